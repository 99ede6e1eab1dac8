"""`gmeta train` compared with RecBole: the same files, tasks and metrics, both tools with their defaults.

    python tools/bench/recbole.py --data FOLDER --peer-python PEER/bin/python --json FILE

FOLDER is RecBole's form of MovieLens-100K: ``ml-100k.inter``, ``.user`` and ``.item``. RecBole needs a
separate environment: pip install recbole==1.2.1 torch 'numpy<2' 'pandas<3' 'setuptools<81'. Each tool draws
its own split 8:1:1 and makes one run. RecBole trains one model a call, where `gmeta train` tunes and measures
baselines beside its models.

seconds     processor seconds: of prepare, train and evaluate; of RecBole's call; both with imports
1-hr@10     the share of users without a hit among ten items, of all interactions; and 1-ndcg@10
log_loss    of likes, ratings of at least 4, in random rows; and 1-auc
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Result, parser, report

FORM = Path(__file__).parent / "parts" / "recbole_form.py"
MODELS = {"retrieval": ("EASE", "BPR", "ItemKNN", "Pop"), "ranking": ("DeepFM", "FM")}
METRICS = {
    "retrieval": {"1-hr@10": ("hr@10", "hit@10"), "1-ndcg@10": ("ndcg@10", "ndcg@10")},
    "ranking": {"log_loss": ("logloss", "logloss"), "1-auc": ("auc", "auc")},
}
LIKES = ["--label", "rating >= 4"]


def by_gmeta(data: Path, task: str, folder: Path, given: list[str]) -> tuple[float, dict[str, Any]]:
    """Run the commands; return processor seconds and the results of seed 0, method or baseline -> metrics."""
    own = ["--task", "user_id", "--time", "timestamp", *(LIKES if task == "ranking" else [])]
    random_rows = ["--set", 'protocol="random"'] if task == "ranking" else []
    before = os.times()
    for words in (
        ["prepare", "--data", str(data), *own, "--out", f"{task}-data"],
        ["train", "--for", task, "--data", f"{task}-data", "--run", task, *random_rows, *given],
        ["evaluate", "--run", task, "--json", f"{task}.json"],
    ):
        subprocess.run([sys.executable, "-m", "gmeta", *words], cwd=folder, check=True, capture_output=True)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    results = json.loads((folder / f"{task}.json").read_text())["results"]
    first = results if task == "ranking" else next(iter(results.values()))
    return seconds, {name: seeds[0] for name, seeds in first.items()}


def by_recbole(python: str, data: Path, task: str, model: str, folder: Path) -> dict[str, Any]:
    """Train and measure a model with the peer's interpreter."""
    words = [python, str(FORM), str(data), task, model]
    done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_small(folder: Path) -> Path:
    """Write a small data set in RecBole's form."""
    data, draw = folder / "small", random.Random(0)
    data.mkdir()
    rows = [
        f"{user}\t{item}\t{draw.randint(1, 5)}\t{draw.randint(0, 10**6)}"
        for user in range(60)
        for item in draw.sample(range(40), 12)
    ]
    head = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    (data / "small.inter").write_text("\n".join([head, *rows]) + "\n")
    return data


def main() -> None:
    """Run both tools on both tasks."""
    options = parser(__doc__)
    options.add_argument("--data", type=Path, help="the folder of ml-100k.inter, .user and .item")
    options.add_argument("--peer-python", help="the interpreter of an environment with RecBole")
    given = options.parse_args()
    if given.data is None and not given.smoke:
        options.error("--data is missing: the folder of ml-100k.inter, .user and .item")
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_small(folder) if given.smoke else given.data.resolve()
        for task, models in MODELS.items():
            small = ["--set", "methods={}"] if given.smoke else []
            seconds, own = by_gmeta(data, task, folder, small)
            results.append(Result(f"recbole/{task}/seconds", seconds, "s"))
            peers = {}
            if given.peer_python:
                peers = {each: by_recbole(given.peer_python, data, task, each, folder) for each in models}
            for label, (key, of_peer) in METRICS[task].items():
                inverse = label.startswith("1-")
                for model, peer in peers.items() or [("RecBole", None)]:
                    best = own["blend"][key]
                    theirs = None if peer is None else peer["test"][of_peer]
                    results.append(
                        Result(
                            f"recbole/{task}/{label}/blend",
                            1 - best if inverse else best,
                            label,
                            model,
                            1 - theirs if inverse and theirs is not None else theirs,
                        )
                    )
            results += [
                Result(f"recbole/{task}/seconds/{model}", peer["seconds"], "s")
                for model, peer in peers.items()
            ]
    report("gmeta train beside RecBole", results, given.json)


if __name__ == "__main__":
    main()
