"""How fast a next-item model trains, compared with RecTools' SASRec in PyTorch.

    python tools/bench/next_item.py --peer-python PATH --json FILE

Both train SASRec on the same file with the same split (a user's last item is for the test, the previous one
for validation): width 64, 1 block, 1 head, length 50, 128 users a step, dropout .2, Adam at 1e-3 with β₂ .98,
and equally many threads. Each runs in a separate process; after an untimed turn they train in turns. A turn
is a share of an epoch, since the peer takes minutes for one: by default a third of gmeta's and 5 % of the
peer's.

epochs_per_second  of training and reading, at the median turn
    sasrec                each in its default form: 8,192 negatives for a whole step; RecTools' default loss,
                          a softmax of the whole catalogue
    sasrec/negatives256   256 negatives for each position, RecTools' "sampled_softmax"
processor_seconds_per_epoch  the same work in processor seconds of the process, which depend less on other
                   work on the machine
seconds_to_0.0515  with --accuracy: until the test items' NDCG@10 reaches that value at the epoch that is best
                   in validation; start, first traces and measuring included. gmeta has 8,192 negatives a
                   step, RecTools the 256 that its authors report .0531 with (arXiv 2508.06450). All items are
                   ranked, and ties count against the model. If the value isn't reached within --minutes, or
                   there are --patience epochs without a better one in validation, there is no such figure;
                   the JSON's first object shows how far the contender came

Differences: gmeta computes histories without padding, RecTools pads all to 50. gmeta's Adam moves the rows
that a step looks up, RecTools' all. gmeta learns a bias of items that are in the history, which are negatives
too, leaves out negatives that equal the positive, and multiplies vectors by 8 before the block. RecTools has
weights in the block's norms. Both know and rank only the items in training.

RecTools can't be installed beside gmeta's pins: pip install 'rectools[torch]==0.19.0' in a separate
environment, and name its interpreter by --peer-python or GMETA_PEER_PYTHON. Without one the peer is absent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import Result, parser, report
from parts.next_item.turns import Turns

SETTINGS = {
    "dim": 64,
    "max_length": 50,
    "users_per_batch": 128,
    "dropout": 0.2,
    "learning_rate": 1e-3,
    "seed": 0,
}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sasrec": ({}, {"negatives": None}),
    "sasrec/negatives256": ({"negatives": 256, "negatives_per": "position"}, {"negatives": 256}),
}
"""Form -> settings of gmeta's, and of the peer's."""

FOLDERS = (Path("data/sequences"), Path("../shared/data/sequences"))
GOAL = 0.0515
OURS, PEER = "gmeta", "RecTools"
WAY = {OURS: "sasrec", PEER: "sasrec/negatives256"}
"""The form in which each trains to the goal."""


@dataclass(frozen=True)
class Contenders:
    """Starts gmeta and its peer on a file."""

    file: Path
    threads: int
    peer_python: str | None
    workers: int

    @property
    def names(self) -> list[str]:
        """Return the trainers that are available."""
        return [OURS, PEER] if self.peer_python else [OURS]

    def start(self, name: str, form: str) -> Turns:
        """Start a process."""
        shared = {**SETTINGS, "file": str(self.file), "threads": self.threads}
        ours, theirs = FORMS[form]
        if name == OURS:
            return Turns(sys.executable, "gmeta_form", {**shared, **ours})
        return Turns(self.peer_python, "rectools_form", {**shared, **theirs, "workers": self.workers})


def time_epochs(contenders: Contenders, form: str, rounds: int, shares: list[float]) -> list[Result]:
    """Train in turns, after one to warm up."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in contenders.names}
    with ExitStack() as stack:
        trainers = {name: stack.enter_context(contenders.start(name, form)) for name in seconds}
        for turn in range(1 + rounds):
            for (name, trainer), share in zip(trainers.items(), shares, strict=False):
                took = trainer.train(share)
                if turn:
                    seconds[name].append(took)
                print(f"{form}, turn {turn}: {name} {took[0]:.1f} s an epoch", flush=True)
    clock, processors = (
        {name: np.median(took, axis=0)[of] for name, took in seconds.items()} for of in (0, 1)
    )
    rates = {name: 1 / took for name, took in clock.items()}
    name = f"next_item/beauty/{form}"
    return [
        Result(f"{name}/epochs_per_second", rates[OURS], "epochs/s", PEER, rates.get(PEER)),
        Result(f"{name}/processor_seconds_per_epoch", processors[OURS], "s", PEER, processors.get(PEER)),
    ]


def reach_goal(contenders: Contenders, name: str, minutes: float, patience: int) -> dict[str, Any]:
    """Train one to the goal; return how far it came."""
    begin, far = time.perf_counter(), {"reached": False, "epoch": 0, "validation": -1.0}
    with contenders.start(name, WAY[name]) as trainer:
        for epoch in range(1, 1000):
            trainer.train(1.0)
            if (validation := trainer.measure("validation")) > far["validation"]:
                far |= {"epoch": epoch, "validation": validation, "test": trainer.measure("test")}
                far["reached"] = far["test"] >= GOAL
            far |= {"epochs": epoch, "seconds": round(time.perf_counter() - begin, 1)}
            print(f"to {GOAL}: {name} {far}", flush=True)
            if far["reached"] or epoch - far["epoch"] >= patience or far["seconds"] >= 60 * minutes:
                break
    return far


def time_way(far: dict[str, dict[str, Any]]) -> list[Result]:
    """Return the seconds to the goal, if gmeta reached it and the peer is absent or reached it too."""
    if not far[OURS]["reached"]:
        return []
    name = f"next_item/beauty/sasrec/seconds_to_{GOAL}"
    value, theirs = far[OURS]["seconds"], far.get(PEER)
    if theirs and not theirs["reached"]:
        return [Result(name, value, "s")]
    return [Result(name, value, "s", PEER, theirs["seconds"] if theirs else None)]


def generate(path: Path) -> Path:
    """Write a tiny file of sequences."""
    rng = np.random.default_rng(0)
    rows = [rng.permutation(40)[: rng.integers(5, 12)] for _ in range(60)]
    path.write_text("".join(f"{user} {' '.join(map(str, row))}\n" for user, row in enumerate(rows)))
    return path


def find_data(folder: Path | None) -> Path:
    """Find Beauty.

    Raises:
      SystemExit: It is missing.
    """
    folders = FOLDERS if folder is None else (folder,)
    for each in folders:
        if (path := each / "Beauty.txt").exists():
            return path
    raise SystemExit(f"no Beauty.txt in {' or '.join(map(str, folders))}: name its folder by --folder")


def peer_versions(python: str | None) -> dict[str, str]:
    """Return the versions in the peer's interpreter.

    Raises:
      SystemExit: It has no RecTools.
    """
    if not python:
        return {PEER: "absent"}
    code = "from importlib.metadata import version; print(version('rectools'), version('torch'))"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"--peer-python has no RecTools:\n{run.stderr}")
    return dict(zip((PEER, "torch"), run.stdout.split(), strict=True))


def main() -> None:
    """Time epochs, and training to the goal, in each form."""
    options = parser(__doc__)
    options.add_argument(
        "--peer-python", default=os.environ.get("GMETA_PEER_PYTHON"), help="an interpreter with RecTools"
    )
    options.add_argument(
        "--folder", type=Path, default=os.environ.get("GMETA_SEQUENCES"), help="of Beauty.txt"
    )
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="of each")
    options.add_argument("--workers", type=int, default=0, help="workers of the peer's loader")
    options.add_argument(
        "--shares", type=float, nargs=2, default=[1 / 3, 0.05], help="shares of an epoch in a turn"
    )
    options.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS, help="to time")
    options.add_argument("--accuracy", action="store_true", help="time training to the goal too")
    options.add_argument("--minutes", type=float, default=25.0, help="most minutes to the goal, for each")
    options.add_argument(
        "--patience", type=int, default=10, help="epochs without improvement before giving up the goal"
    )
    given = options.parse_args()
    versions = peer_versions(given.peer_python)
    with tempfile.TemporaryDirectory() as folder:
        file = generate(Path(folder, "Beauty.txt")) if given.smoke else find_data(given.folder)
        contenders = Contenders(file, given.threads, given.peer_python, given.workers)
        results = []
        for form in given.forms:
            results += time_epochs(contenders, form, given.rounds, given.shares)
        facts: dict[str, Any] = {"threads": given.threads, "peers": versions}
        if given.accuracy:
            way = (given.minutes, given.patience)
            far = {name: reach_goal(contenders, name, *way) for name in contenders.names}
            results, facts = [*results, *time_way(far)], {**facts, "to_goal": far}
    report("Next item", results, given.json, **facts)


if __name__ == "__main__":
    main()
