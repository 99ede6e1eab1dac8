"""Whether training on several ranks reaches the quality of one rank, on the same global batches.

    python tools/bench/quality.py --tasks data/ml-1m --ranks 1 2 4 --json FILE

MAML-DLRM, MeLU and CBML learn on MovieLens-1M, as `gmeta prepare` makes it from MeLU's published files,
whether a user rates a movie 4 or more; they are measured on the users of MeLU's `user_cold`. Networks and
rates are those of `models/dlrm`, `models/melu` and `models/cbml`, the inner loop is that of
`ml-1m-binary.toml` for all. GRM (`grm_quality.py`) learns clicks and purchases on a generated log, one for
each seed, and is measured on new users. A global batch has as many tasks, or users, on any number of ranks,
and an epoch is `--steps` of them.

np1, np2, …   AUC and GAUC of that many ranks after the last epoch, the mean of the seeds. They all see the
              same global batches in the same order: data are divided into as many shares as the most ranks
              there are, and a rank reads one share or several (`GMETA_SHARES`). So their numbers agree to the
              rounding of sums, which training magnifies
spread        the standard deviation over the seeds
delta         the largest difference from one rank at the same seed: |AUC of N ranks - AUC of one|
own           one rank whose data aren't divided. Its batches have other tasks, because it reads one range of
              an epoch where several ranks read several side by side: its numbers agree with theirs only
              statistically
bfloat16      rows and gradients travel in 16 bits: the same batches, rounded; only for several ranks
pipeline      `gmeta.Pipeline(depth=1, micro_batches=2)`: the same batches, and sums in another order
balance       batches of about equal tokens (`gmeta.io.Balance`), which differ from plain ones, and are the
              same for all numbers of ranks: the delta is from one rank with balance

The last three are measured for MAML-DLRM and GRM. The JSON's first object has the metrics of each epoch.
G-Meta compares AUC in its figure 3, MTGenRec GAUC in its figure 9, both with another system.

With --rows FOLDER each job keeps its results in a file there, and resumes from it when it is started again;
`--jobs` names the jobs to run; without a name it runs none and only reports.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # before TensorFlow is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from gmeta.preprocess import PrepareConfig, SyntheticConfig, prepare
from gmeta.preprocess.synthetic.exposures import ExposureConfig

from harness import Result, parser, report
from parts.jobs import run_job
from parts.quality.figure import plot
from parts.quality.models import GRM, WAYS, experiment, prepare_log

MODELS = ("maml_dlrm", "melu", "cbml", GRM)
VARIED = ("maml_dlrm", GRM)
"""Models that train in every way of `WAYS`, the others in the plain one alone."""

OWN = "own"
Row = dict[str, Any]


def jobs_of(ranks: list[int]) -> dict[str, tuple[int, int]]:
    """Return job -> its number of ranks, and its number of shares of the data."""
    return {OWN: (1, 1), **{f"np{size}": (size, ranks[-1]) for size in ranks}}


def cases_of(job: str, size: int, given: argparse.Namespace) -> list[Row]:
    """Return what a job trains: the plain way first, all seeds of a model one after another."""
    cases = []
    for way in given.ways:
        # One rank sends nothing, and pipelines are measured on several.
        if way != "plain" and (job == OWN or (size == 1 and way != "balance")):
            continue
        models = [model for model in given.models if way == "plain" or model in VARIED]
        cases += [{"model": model, "way": way, "seed": seed} for model in models for seed in given.seeds]
    return cases


def results_of(rows: dict[str, list[Row]]) -> list[Result]:
    """Turn the rows of all jobs into means, spreads, and differences from one rank at the same seed."""
    last = {
        (row["case"]["model"], row["case"]["way"], job, metric, row["case"]["seed"]): values[-1]
        for job, of_job in rows.items()
        for row in of_job
        for metric, values in row["metrics"].items()
    }
    results = []
    for model, way, job, metric in dict.fromkeys(key[:4] for key in last):
        values = {key[4]: value for key, value in last.items() if key[:4] == (model, way, job, metric)}
        name = "/".join(["quality", model, job, *([way] if way != "plain" else []), metric])
        results.append(Result(name, statistics.mean(values.values()), metric.split("_")[0].upper()))
        if len(values) > 1:
            results.append(Result(f"{name}/spread", statistics.stdev(values.values()), results[-1].unit))
        by = "balance" if way == "balance" else "plain"
        alone = {seed: last.get((model, by, "np1", metric, seed)) for seed in values}
        off = [abs(values[seed] - one) for seed, one in alone.items() if one is not None]
        if off and (job, way) not in (("np1", "plain"), ("np1", "balance")):
            results.append(Result(f"{name}/delta", max(off), results[-1].unit))
    return results


def run(given: argparse.Namespace, folder: Path) -> dict[str, list[Row]]:
    """Train in all requested jobs, and return job -> its rows."""
    names = ("steps", "epochs", "tasks_per_batch", "users_per_batch", "log", "ranker", "experiment")
    settings = {name: getattr(given, name) for name in names}
    settings |= {"logs": str(folder), "tasks": str(given.tasks)}
    if GRM in given.models and given.jobs:
        for seed in given.seeds:
            if not (folder / f"data-{seed}").exists():
                prepare_log(folder, ExposureConfig(seed=seed, **given.log))
    found = {}
    for job, (size, shares) in jobs_of(given.ranks).items():
        file, cases = folder / f"{job}.json", cases_of(job, size, given)
        if job in given.jobs:
            of_job = {**settings, "cases": cases}
            run_job("quality.rank", size, of_job, file, {"GMETA_SHARES": str(shares)})
        if file.exists():
            found[job] = [row for row in json.loads(file.read_text()) if row["case"] in cases]
    return found


def arguments() -> argparse.Namespace:
    """Return what to train; reject sizes that don't fit together."""
    options = parser(__doc__)
    options.add_argument("--tasks", type=Path, help="MovieLens-1M, prepared; needed for all models but grm")
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--epochs", type=int, default=4, help="(default: %(default)s)")
    options.add_argument("--steps", type=int, default=80, help="steps of an epoch (default: %(default)s)")
    options.add_argument("--jobs", nargs="*", help="jobs to run now, such as own np1 np2 (default: all)")
    options.add_argument("--rows", type=Path, help="folder that keeps the results of jobs")
    options.add_argument("--plot", type=Path, help="draw the metrics by epoch into this PNG")
    given = options.parse_args()
    given.ranks = sorted({1, *given.ranks})
    given.tasks_per_batch = given.users_per_batch = 32
    given.log = {"users": 800, "mean_events": 60.0, "exposures": 40}
    given.ranker = {"dim": 32, "blocks": 1, "rate": 3e-3}
    given.experiment = experiment()
    if given.smoke:
        given.models, given.ways, given.ranks = ["maml_dlrm", GRM], ["plain"], [1, 2]
        given.seeds, given.epochs, given.steps = [0], 1, 2
        given.tasks_per_batch = given.users_per_batch = 4
        given.log = {"users": 20, "mean_events": 10.0, "exposures": 10, "page": 5}
        given.ranker = {"dim": 4, "blocks": 1, "rate": 3e-3}
        own = {"test_splits": ["cold"], "features": "movielens", "embedding_dim": 4, "hidden": [4]}
        given.experiment |= own
    known = jobs_of(given.ranks)
    given.jobs = list(known) if given.jobs is None else given.jobs
    if strange := [job for job in given.jobs if job not in known]:
        options.error(f"--jobs: no job {', '.join(strange)}; there are {', '.join(known)}")
    if any(given.tasks_per_batch % size or given.ranks[-1] % size for size in given.ranks):
        options.error(
            f"--ranks: {given.ranks} must divide the largest of them, and that {given.tasks_per_batch}"
        )
    if given.tasks is None and not given.smoke and given.jobs and set(given.models) != {GRM}:
        options.error("--tasks is needed: the folder that gmeta prepare --data ml-1m --out has made")
    return given


def main() -> None:
    """Train on all numbers of ranks, and compare."""
    given = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = given.rows or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if given.smoke:
            given.tasks = Path(name) / "tasks"
            prepare(SyntheticConfig(users=40), given.tasks, PrepareConfig())
        rows = run(given, folder)
    facts = {key: getattr(given, key) for key in ("ranks", "epochs", "steps", "log", "ranker")}
    facts |= {key: getattr(given, key) for key in ("tasks_per_batch", "users_per_batch")}
    report("Quality on ranks", results_of(rows), given.json, **facts, by_epoch=rows)
    if given.plot:
        plot(given.plot, rows)


if __name__ == "__main__":
    main()
