"""Meta-training on more and more ranks: samples a second, and whether they learn what one rank learns.

    python tools/bench/scaling.py --json FILE
    python tools/bench/scaling.py --ranks 1 2 4 --model dlrm
    python tools/bench/scaling.py --adapt all --outer gather --read text
    python tools/bench/scaling.py --ablation --gbit 1
    python tools/bench/scaling.py --shard --ranks 2 4 --json FILE

MAML of second order on generated tasks, under `fit`: Zipf ids of many features into dynamic tables, which are
divided among the ranks, and a multi-layer perceptron, which each rank has. A rank's batch stays the same, so
N ranks do N times the work. Where there are GPUs each rank takes one for the dense part; rows are in host
memory. The small model has steps of a few milliseconds on a GPU, which the exchange dominates; the larger
one, with the features of a click log and five inner steps, has steps that computation dominates.

samples      support and query samples a second, all ranks together; medians over epochs, the first left out
speed_up     their ratio to N times one rank's (G-Meta, table 1: 1, 0.94, 0.89, 0.86 of ideal)
agreement    the largest difference of any row or weight after training on the same global batches, relative
             to the largest number beside it, from one rank on the CPU; also with rows and gradients that
             travel in 16 bits between two ranks
rms          the root mean square of these differences over that of the numbers; the largest difference comes
             from Adam: if a gradient is only rounding, its sign is random, and a step has its full length
rms_rows     the same of the tables' rows alone
gather, late with --outer: samples a second compared with all-reduce, epochs in turn, and agreement with it
ablation     with --ablation, on the largest number of ranks: samples a second with each way of reading and
             each network, compared with text over the slow one, in turn (G-Meta, figure 4: on 8 GPUs 1.27
             times the baseline by reading, 1.12 by the network, 1.45 by both)

shard        with --shard, which measures nothing else: samples a second with ``shard_optimizer=True``
             compared with False, epochs in turn
optimizer    with --shard: the bytes of Adam's state on the rank that has most, compared with those of a rank
             that has all

--adapt all     embedding rows adapt in the inner loop too (G-Meta, algorithm 1), not just the layers
--read          memory: batches are made beforehand. text: lines of comma-joined numbers in TFRecords, decoded
                and grouped by TensorFlow's ops. columnar: gmeta's records, by its GroupBatch. All three give
                the same batches
--outer         gather: rank 0 gathers the dense gradients and sends their sum back, which G-Meta replaces
                with an all-reduce (section 2.1.3). late: one all-reduce sums them after the backward pass
--network       nvlink: as NCCL connects the GPUs. socket: NCCL without peer-to-peer, shared memory and RDMA
--gbit N        on a CPU each rank has its own network, joined by wires of N Gbit/s: the slow network of
                --ablation, whose fast one has 40
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # before TensorFlow is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from support.hosts import why_no_rack

import numpy as np
import tensorflow as tf
from harness import Result, parser, report
from parts.jobs import SOCKET, run_job
from parts.meta import task_files

SIZES = {
    "dim": 32,
    "features": 16,
    "hidden": [512, 256],
    "tasks": 64,
    "support": 24,
    "query": 8,
    "inner_steps": 1,
    "distinct_steps": 10,
    "steps": 50,
    "wire_dtype": "float32",
}
OUTER = ("allreduce", "gather", "late")
MODELS: dict[str, dict[str, Any]] = {
    "small": {},
    "dlrm": {"dim": 64, "features": 23, "hidden": [1024, 512, 256], "tasks": 256, "inner_steps": 5},
}


FAST = 40.0
"""Gbit/s of wires that two cores don't fill."""


def run(
    ranks: int,
    settings: dict[str, Any],
    folder: Path,
    gpu: bool = True,
    module: str = "meta.rank",
) -> Any:
    """Train on this many ranks; see parts/meta/rank.py."""
    environment = {} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    if settings.get("network") == "socket":
        environment |= SOCKET
    own = settings["tasks"] // (ranks if settings["keep_rows"] else 1)
    ways = {settings["read"], *(each.get("read", "memory") for each in settings.get("variants", {}).values())}
    if ways != {"memory"}:
        task_files.write(folder / "data", {**settings, "tasks": own}, ranks)
    settings = {**settings, "data": str(folder / "data")}
    gbit = settings.get("gbit") if ranks > 1 else None
    return run_job(module, ranks, settings, folder / "found.json", environment, gbit)


def learned_rows(ranks: int, settings: dict[str, Any], gpu: bool) -> dict[str, np.ndarray]:
    """Rows of all ranks in the order of their keys, and rank 0's dense weights."""
    with tempfile.TemporaryDirectory() as name:
        run(ranks, settings, Path(name), gpu)
        parts = [dict(np.load(Path(name) / f"rank{rank}.npz")) for rank in range(ranks)]
    found = {key: value for key, value in parts[0].items() if key.startswith("dense")}
    for number in range(sum(key.startswith("keys") for key in parts[0])):
        keys = np.concatenate([part[f"keys{number}"] for part in parts])
        rows = np.concatenate([part[f"rows{number}"] for part in parts])
        found |= {f"keys{number}": np.sort(keys), f"rows{number}": rows[np.argsort(keys)]}
    return found


def difference(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference, relative to the largest number of its array; infinite if keys differ."""
    worst = 0.0
    for name, values in expected.items():
        if found[name].shape != values.shape:
            return float("inf")
        worst = max(worst, float(np.abs(found[name] - values).max() / max(np.abs(values).max(), 1e-30)))
    return worst


def root_mean_square(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], parts: tuple[str, ...] = ("rows", "dense")
) -> float:
    """The root mean square of the differences, relative to that of the numbers; the worst array's."""
    pairs = [(found[name], values) for name, values in expected.items() if name.startswith(parts)]
    return max(float(np.linalg.norm(own - values) / np.linalg.norm(values)) for own, values in pairs)


def agreement(ranks: list[int], settings: dict[str, Any]) -> list[Result]:
    """The difference between what several ranks and one rank on the CPU have learned; in 16 bits too."""
    results = []
    expected = learned_rows(1, settings, gpu=False)
    for size in ranks:
        off = difference(learned_rows(size, settings, gpu=True), expected)
        results.append(Result(f"scaling/agreement/np{size}", off, "relative"))
    for wire in ("float16", "bfloat16"):
        found = learned_rows(2, {**settings, "wire_dtype": wire}, gpu=True)
        off, deviation = difference(found, expected), root_mean_square(found, expected)
        results.append(Result(f"scaling/agreement/np2/{wire}", off, "relative"))
        results.append(Result(f"scaling/rms/np2/{wire}", deviation, "relative"))
        rows = root_mean_square(found, expected, ("rows",))
        results.append(Result(f"scaling/rms_rows/np2/{wire}", rows, "relative"))
    return results


def beside_allreduce(ranks: int, settings: dict[str, Any]) -> list[Result]:
    """The difference between what ranks learn by another outer rule and by all-reduce."""
    rules = settings["outer"], "allreduce"
    found, expected = (learned_rows(ranks, {**settings, "outer": rule}, True) for rule in rules)
    return [Result(f"scaling/agreement/np{ranks}/{rules[0]}", difference(found, expected), "relative")]


def paces(
    ranks: int, settings: dict[str, Any], variants: dict[str, dict[str, Any]]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Variant -> samples a second in each epoch, which the variants train in turn in one job.

    The second result has the bytes of the optimizer's state.
    """
    samples = settings["tasks"] * ranks * (settings["support"] + settings["query"])
    of_job = {**settings, "variants": variants, "rounds": settings["epochs"] - 1}
    with tempfile.TemporaryDirectory() as folder:
        found = run(ranks, of_job, Path(folder), module="meta.paces")
    rates = {name: [1e3 * samples / each for each in times] for name, times in found["paces"].items()}
    return rates, found["optimizer_bytes"]


def ablation(ranks: int, settings: dict[str, Any], networks: dict[str, dict[str, Any]]) -> list[Result]:
    """Samples a second with each way of reading and each network, slow ones first; jobs and epochs in turn.

    Args:
      ranks: How many.
      settings: The settings of the ranks.
      networks: Name -> its settings, the slow one first.
    """
    variants = {read: {"read": read} for read in ("text", "columnar")}
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(settings["jobs"]):
        for network, own in networks.items():
            by_read, _ = paces(ranks, {**settings, **own}, variants)
            for read, found in by_read.items():
                rates.setdefault((read, network), []).extend(found)
    medians = {way: statistics.median(each) for way, each in rates.items()}
    base = medians["text", next(iter(networks))]
    return [
        Result(f"scaling/ablation/{read}/{network}/np{ranks}", rate, "samples/s", "neither", base)
        for (read, network), rate in medians.items()
    ]


def sharding(ranks: int, settings: dict[str, Any]) -> list[Result]:
    """Samples a second and bytes of optimizer state with ``shard_optimizer``, compared with those without."""
    variants = {"whole": {}, "shard": {"shard": True}}
    rates, state = paces(ranks, settings, variants)
    whole, shard = (statistics.median(rates[name]) for name in variants)
    return [
        Result(f"scaling/shard/np{ranks}", shard, "samples/s", "whole", whole),
        Result(f"scaling/optimizer/np{ranks}", state["shard"], "bytes", "whole", state["whole"]),
    ]


def networks_of(gpu: bool, gbit: float | None) -> dict[str, dict[str, Any]]:
    """The slow network and the fast one, name -> settings."""
    if gpu:
        return {"socket": {"network": "socket"}, "nvlink": {"network": "nvlink"}}
    return {f"{rate:g}gbit": {"gbit": rate} for rate in (gbit, FAST)}  # with as many threads on either


def arguments() -> argparse.Namespace:
    """Return what to measure; reject what this machine can't."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options.add_argument("--model", choices=MODELS, default="small")
    options.add_argument("--hidden", type=int, nargs="+", help="units of the hidden layers")
    options.add_argument("--tasks", type=int, help="tasks in a rank's batch")
    options.add_argument("--pace-only", action="store_true", help="don't compare what ranks have learned")
    options.add_argument("--adapt", choices=("dense", "all"), default="dense")
    options.add_argument("--read", choices=("memory", "text", "columnar"), default="memory")
    options.add_argument("--outer", choices=OUTER, default="allreduce")
    options.add_argument("--network", choices=("nvlink", "socket"))
    options.add_argument("--gbit", type=float, help="on a CPU: the rate of the wires between ranks")
    options.add_argument("--ablation", action="store_true", help="measure reading and networks, nothing else")
    options.add_argument("--shard", action="store_true", help="measure shard_optimizer, nothing else")
    options.add_argument(
        "--jobs", type=int, default=3, help="jobs of --ablation for each network (default: %(default)s)"
    )
    given = options.parse_args()
    given.gpu = bool(tf.config.list_physical_devices("GPU"))
    if given.network and not given.gpu:
        options.error("--network names how NCCL joins GPUs, and there is none: give --gbit")
    if given.gbit is not None and (given.gpu or (why := why_no_rack())):
        options.error("--gbit is for ranks on a CPU; GPUs have --network" if given.gpu else f"--gbit: {why}")
    if given.ablation and (given.network or given.read != "memory" or (not given.gpu and not given.gbit)):
        options.error("--ablation goes through --read and --network itself; on a CPU it needs --gbit")
    return given


def main() -> None:
    """Run the numbers of ranks one after another."""
    given = arguments()
    ranks = [1, 2] if given.smoke else sorted({1, *given.ranks})
    chosen = {"adapt": given.adapt, "read": given.read, "outer": given.outer, "network": given.network}
    settings = {**SIZES, **MODELS[given.model], **chosen, "epochs": 1 + given.rounds, "keep_rows": False}
    settings |= {"hidden": given.hidden or settings["hidden"]}
    settings |= {"tasks": given.tasks or settings["tasks"], "gbit": given.gbit, "jobs": given.jobs}
    if given.smoke:
        settings |= {"tasks": 4, "hidden": [8], "features": 3, "steps": 2, "distinct_steps": 1, "jobs": 1}
    # Few steps: rounding grows with training, and more so through second derivatives.
    same = {**settings, "tasks": 4 * ranks[-1], "distinct_steps": 10, "steps": 10, "epochs": 1}
    same["keep_rows"] = True
    if given.ablation:
        results = ablation(ranks[-1], {**settings, "gbit": None}, networks_of(given.gpu, given.gbit))
        report("Reading and networks", results, given.json, settings=settings, gpus_a_rank=int(given.gpu))
        return
    if given.shard:
        results = [one for size in ranks if size > 1 for one in sharding(size, settings)]
        report("Sharded optimizer", results, given.json, settings=settings, gpus_a_rank=int(given.gpu))
        return
    results, rates, gpus = [], {}, 0
    if given.smoke:  # tests check that ranks agree
        given.pace_only = True
    for size in ranks:
        with tempfile.TemporaryDirectory() as folder:
            found = run(size, settings, Path(folder))
        rates[size] = found["samples_an_epoch"] / statistics.median(found["seconds"][1:])
        gpus = found["gpus"]
        results.append(Result(f"scaling/samples/np{size}", rates[size], "samples/s"))
        if given.outer != "allreduce" and size > 1:
            rules = given.outer, "allreduce"
            both, _ = paces(size, settings, {rule: {"outer": rule} for rule in rules})
            other, allreduce = (statistics.median(both[rule]) for rule in rules)
            results.append(
                Result(f"scaling/{given.outer}/np{size}", other, "samples/s", "all-reduce", allreduce)
            )
    for size in ranks[1:]:
        results.append(Result(f"scaling/speed_up/np{size}", rates[size] / size / rates[1], "of ideal"))
    if not given.pace_only:
        results += agreement(ranks if gpus else ranks[1:], same)
        if given.outer != "allreduce":
            results += [one for size in ranks[1:] for one in beside_allreduce(size, same)]
    report("Meta-training on ranks", results, given.json, settings=settings, gpus_a_rank=gpus)


if __name__ == "__main__":
    main()
