"""How fast a GRM trains on ranks with one GPU each, embeddings included, and what each design choice gains.

    python tools/bench/gpu_grm.py --ranks 1 2 --json FILE
    python tools/bench/gpu_grm.py --models d1024x22 --sequences 80 --heads 4 8 --cases ablation --json FILE
    python tools/bench/gpu_grm.py --models d1024x22 --cases ablation --ways separate pipeline --json FILE

MTGenRec's experiments (sections 3.2 to 3.4 and 4; figures 7, 10 and 13; table 6). `gmeta.models.GRM`: width
times blocks 512 x 3 with 2 heads, and 1,024 x 22 with 4. HSTU in its research form with a bias of times (the
model rejects one of places: scores would depend on earlier exposures), 4 experts of which each of the tasks
CTR and CVR chooses 2, towers, the loss of CTR and CTCVR, in bfloat16; rows are float32, in tables on the GPU.
A user has 2 contextual tokens, a history, and 16 exposures. Lengths are lognormal (sigma 0.9, cut to a mean
of 600 and at most 3,000). Six features of 64 or 128 numbers, ids by Zipf's law (1.05), of 10 million users
and as many items. Adam on weights and rows. A rank's batch has 480 sequences, or 80 of the larger model; if
memory runs out, the job starts again with three quarters of them, and reports that. Each rank has its own
batches, in host memory; reading isn't measured.

Case ``ablation``, a job for each number of ranks. Each of --ways has its own model; in turn they train three
epochs of --steps batches. The first isn't timed, because in it ranks wait for the last one to receive rank
0's weights. Rates are medians over epochs: the tokens of all ranks over the slowest rank's seconds.

separate   each feature has its own table and lookup, with its own exchanges of keys and rows; a key is sent
           and read as often as it occurs; batches of a fixed number of sequences
merged     features of equal width share a table, and all share a lookup and its two exchanges
dedup      keys are distinct at the sender, and again at the owner
balanced   batches of about equally many tokens (algorithm 1, as `gmeta.io.Balance` with its default
           cost), on average as many as in the fixed ones
pipeline   keys and rows are fetched --depth batches ahead (`gmeta.Pipeline`)

ablation   tokens a second in each way, compared with the previous way; under ``of_first``, with ``separate``
train      tokens a second of all ranks, in the last way
mfu        the operations that its steps need over those of a large product of bfloat16 matrices on as many
           GPUs in the same time, in percent. Counted as in `tools/bench/gpu_hstu.py` (of attention, pairs
           that see each other: exposures don't); and, three times those of the forward pass, products that
           make tokens of embeddings, gates, experts, towers. ``data_sheet``: over 989 TFLOP/s a GPU, if it is
           one of these
matmul     that product, measured in the job by all ranks at once, rank 0's TFLOP/s
rate       the operations that its steps need, in TFLOP/s a rank
loss       of the last epoch in each way. ``merged`` and ``dedup`` learn the same up to rounding
memory     the most memory that TensorFlow used on rank 0's GPU in an epoch, beyond weights and slots; without
           the tables' rows, which have their own memory
speed_up   tokens a second on N ranks over N times those on one, with equally large batches per rank; of each
           way

--network socket makes NCCL use only sockets, as between machines without RDMA; the figures' names then
contain ``/socket``.

Case ``figure7``, on one GPU: it runs the steps on the batches of each of --replay ranks, one after another,
without exchanges. The time of a step ends when its loss has reached the host.

figure7    the slowest rank's time over the ranks' mean, averaged over steps; 1 is even. In this order, step
           by step and rank by rank: ``fixed`` batches, ``balanced`` ones, ``by_cost``, those of equal cost as
           `SequenceCost.of_hstu` counts operations, and ``measured``, those of equal cost as
           `SequenceCost.of_steps` fits it beforehand to the times of 20 batches that no rank has: drawn ones,
           halves, and batches of shorter and of longer sequences. All have about as many tokens on average. A
           batch is trained on once, and then the median of 3 times counts; or only the second time, if a step
           of all ranks and ways wouldn't end within --seconds otherwise. ``slowest`` and ``fastest``:
           milliseconds, averaged over steps
pair       the time of a pair of tokens relative to a token, over the ratio of `SequenceCost.of_hstu`: b / a
           of both

The file's ``replayed`` has the seconds of all batches, with their tokens and sums of squared lengths, the fit
and its batches, and ``repeats``. If times determine no cost, as on a CPU at small sizes, ``measured`` is left
out, and the reason is reported.

Case ``forms``, on one GPU: a sample is an exposure. The pairwise form has a sequence for each exposure, with
a copy of its user's history: a batch has as many sequences, from a sixteenth of the users.

form/samples  samples a second of training on users, compared with the pairwise form with as many sequences
              per batch
form/same     the same for batches with the same samples: those of users have a sixteenth of the sequences
form/memory   GiB as in ``memory`` above, of training on the same samples, compared with the pairwise form

A job ends its rounds after --seconds, but makes at least one; if it is ended after --timeout, its figures so
far count. Figures are in the file once their job has ended.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # before TensorFlow is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gmeta
from gmeta.core.errors import RanksError
from gmeta.io import SequenceCost

import tensorflow as tf
from harness import Result, parser, report
from parts.balance_lengths import LONGEST
from parts.gpu_grm.ablation import WAYS
from parts.gpu_grm.in_rank import says_memory_ended
from parts.gpu_grm.replay import spread
from parts.jobs import SOCKET, run_job
from parts.notes import Notes, gpu

MODELS = {"d512x3": (512, 3, 2, 480), "d1024x22": (1024, 22, 4, 80)}  # width, blocks, heads, sequences
CASES = ("ablation", "figure7", "forms")
HEAD_WIDTHS = (64, 128, 256)  # of the GPU's kernels
SHEET = 989e12  # operations a second of an H100 or H200 in SXM form
FEWER, LEAST = 0.75, 16  # of the sequences, if memory has ended
_SMALL = {
    "mean": 30,
    "longest": 60,
    "exposures": 4,
    "most": 1000,
    "matmul": 64,
    "batches": 2,
    "rounds": 1,
    "timeout": 1800,
}


def job(module: str, ranks: int, settings: dict[str, Any], device: str) -> tuple[Any, dict[str, Any]]:
    """Run a job, with fewer sequences if memory ends; return what it measured, and the settings it ran with.

    If a job fails otherwise, or takes too long, that is reported; its figures so far count.
    """
    while True:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            try:
                environment, timeout = {"GMETA_TABLE_DEVICE": device}, settings["timeout"]
                if settings.get("network") == "socket":
                    environment |= SOCKET
                found = run_job(f"gpu_grm.{module}", ranks, settings, out, environment, timeout=timeout)
                return found, settings
            except RanksError as error:
                fewer = int(settings["sequences"] * FEWER)
                if says_memory_ended(str(error)) and fewer >= LEAST:
                    print(
                        f"  memory ended with {settings['sequences']} sequences; again with {fewer}",
                        flush=True,
                    )
                    settings = {**settings, "sequences": fewer}
                    continue
                print(f"  {module} on {ranks} ranks failed: {error}", flush=True)
                return (json.loads(out.read_text()) if out.is_file() else None), settings


def ablation(path: str, ranks: int, found: dict[str, Any], sheet: float | None) -> Iterator[Result]:
    """The figures of a job of the ablation."""
    rates = rates_of(found)
    names = list(rates)
    for name, before in zip(names, [None, *names], strict=False):
        where = f"{path}/ablation/{name}/np{ranks}"
        peer = () if before is None else (before, rates[before])
        yield Result(where, rates[name], "tokens/s", *peer)
        if before not in (None, names[0]):
            yield Result(f"{where}/of_first", rates[name], "tokens/s", names[0], rates[names[0]])
    last = names[-1]
    needed = found["operations"][last] / statistics.median(found["seconds"][last]) / ranks
    yield Result(f"{path}/train/np{ranks}", rates[last], "tokens/s")
    yield Result(f"{path}/matmul/np{ranks}", found["rate"] / 1e12, "TFLOP/s")
    yield Result(f"{path}/rate/np{ranks}", needed / 1e12, "TFLOP/s a rank")
    yield Result(f"{path}/mfu/np{ranks}", 100 * needed / found["rate"], "% of matmul")
    if sheet is not None:
        yield Result(f"{path}/mfu/np{ranks}/data_sheet", 100 * needed / sheet, "% of the data sheet")
    for name in names:
        peer = ("merged", found["loss"]["merged"]) if name == "dedup" and "merged" in names else ()
        yield Result(f"{path}/loss/{name}/np{ranks}", found["loss"][name], "loss", *peer)
    for name, peak in found["peak"].items():
        yield Result(f"{path}/memory/{name}/np{ranks}", peak / 2**30, "GiB")


def rates_of(found: dict[str, Any]) -> dict[str, float]:
    """Way -> tokens a second of all ranks."""
    return {way: found["tokens"][way] / statistics.median(each) for way, each in found["seconds"].items()}


def speed_ups(path: str, of_ranks: dict[int, tuple[int, dict[str, Any]]]) -> Iterator[Result]:
    """The share of ideal that several ranks reach, if the job of one rank has equally large batches.

    Args:
      path: The path of the figures.
      of_ranks: Number of ranks -> sequences of a rank's batch, and what the job measured.
    """
    for ranks, (sequences, found) in of_ranks.items():
        if ranks == 1 or 1 not in of_ranks:
            continue
        if of_ranks[1][0] != sequences:
            print(
                f"  no speed_up/np{ranks}: one rank had {of_ranks[1][0]} sequences a batch, not {sequences}"
            )
            continue
        alone, together = rates_of(of_ranks[1][1]), rates_of(found)
        share = {way: together[way] / ranks / alone[way] for way in together}
        yield Result(f"{path}/speed_up/np{ranks}", share[next(reversed(share))], "of ideal")
        for way, each in share.items():
            yield Result(f"{path}/speed_up/np{ranks}/{way}", each, "of ideal")


def figure7(
    path: str, replayed: list[int], found: dict[str, Any], settings: dict[str, Any]
) -> Iterator[Result]:
    """The figures of replayed batches."""
    for ranks in replayed:
        of = {way: spread(seconds, ranks) for way, seconds in found["seconds"].items()}
        for way, figures in of.items():
            where = f"{path}/figure7/np{ranks}/{way}"
            peer = () if way == "fixed" else ("fixed batches", of["fixed"]["uneven"])
            yield Result(where, figures["uneven"], "max/mean", *peer)
            for name in ("slowest", "fastest"):
                yield Result(f"{where}/{name}", 1e3 * figures[name], "ms")
    fit, counted = found["fit"], SequenceCost.of_hstu(settings["dim"], settings["blocks"])
    if "refused" in fit:
        print(f"  no way measured: {fit['refused']}", flush=True)
    elif fit["linear"]:
        ratio = fit["quadratic"] / fit["linear"] * counted.linear / counted.quadratic
        yield Result(f"{path}/figure7/pair", ratio, "of counted")


def forms(path: str, found: dict[str, Any]) -> Iterator[Result]:
    """The figures of both forms."""
    rates = {
        name: found["samples"][name] / statistics.median(each) for name, each in found["seconds"].items()
    }
    peer = ("pairwise", rates["pairwise"])
    yield Result(f"{path}/form/samples", rates["full"], "samples/s", *peer)
    yield Result(f"{path}/form/same", rates["few"], "samples/s", *peer)
    if found["peak"]:
        own, other = (found["peak"][name] / 2**30 for name in ("few", "pairwise"))
        yield Result(f"{path}/form/memory", own, "GiB", "pairwise", other)


def models(given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path of the figures -> width, blocks, heads and sequences of each requested model."""
    for name, sequences in zip(given.models, given.sequences or [None] * len(given.models), strict=True):
        dim, blocks, usual, batch = MODELS[name]
        for heads in given.heads or [usual]:
            width, rest = divmod(dim, heads)
            if rest or (width not in HEAD_WIDTHS and not given.smoke):
                print(f"{name} with {heads} heads is left out: kernels take heads of {HEAD_WIDTHS} numbers")
                continue
            path = f"gpu_grm/{name}" if heads == usual else f"gpu_grm/{name}/heads{heads}"
            path += "/socket" if given.network == "socket" else ""
            yield path, {"dim": dim, "blocks": blocks, "heads": heads, "sequences": sequences or batch}


def measure(path: str, settings: dict[str, Any], given: argparse.Namespace, notes: Notes) -> bool:
    """Measure the cases of a model; return whether all were."""
    cards = notes.facts["gpu"] or ""
    sheet = SHEET if ("H100" in cards or "H200" in cards) and "PCIe" not in cards else None
    of_ranks: dict[int, tuple[int, dict[str, Any]]] = {}
    complete = True
    for case in given.cases:
        for ranks in given.ranks if case == "ablation" else [1]:
            print(f"{path}: {case} on {ranks} ranks, {settings['sequences']} sequences a rank", flush=True)
            module = "replay" if case == "figure7" else case
            found, own = job(module, ranks, {**settings, "replay": max(given.replay)}, given.device)
            settings = {**settings, "sequences": own["sequences"]}  # where memory has run out, it would again
            notes.facts.setdefault("settings", {})[f"{path}/{case}/np{ranks}"] = own
            if found is None:
                complete = False
                continue
            if case == "ablation":
                of_ranks[ranks] = own["sequences"], found
                figures = ablation(path, ranks, found, sheet)
                notes.facts.setdefault("seconds", {})[f"{path}/np{ranks}"] = found["seconds"]
            else:
                if case == "figure7":
                    notes.facts.setdefault("replayed", {})[path] = found
                figures = figure7(path, given.replay, found, own) if case == "figure7" else forms(path, found)
            for figure in figures:
                notes(figure)
    for figure in speed_ups(path, of_ranks):
        notes(figure)
    return complete


def arguments() -> argparse.Namespace:
    """Return what to measure; reject what this machine can't."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options.add_argument("--sequences", nargs="+", type=int, help="of a rank's batch, one for each model")
    options.add_argument("--heads", nargs="+", type=int, help="each with each model (default: the paper's)")
    options.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    options.add_argument("--ranks", nargs="+", type=int, help="of the ablation (default: 1 and 2)")
    options.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="of the ablation")
    options.add_argument("--network", choices=("nvlink", "socket"), default="nvlink", help="between GPUs")
    options.add_argument("--replay", nargs="+", type=int, default=[8, 16, 32, 64], help="ranks of figure7")
    options.add_argument("--steps", type=int, default=10, help="batches of an epoch (default: %(default)s)")
    options.add_argument("--depth", type=int, default=1, choices=(1, 2), help="(default: %(default)s)")
    options.add_argument("--timeout", type=float, default=420, help="seconds of a job (default: %(default)s)")
    options.add_argument("--seconds", type=float, default=60, help="of a job's rounds (default: %(default)s)")
    options.add_argument(
        "--device", choices=("cpu", "gpu"), help="of the tables (default: gpu if there is one)"
    )
    options.add_argument("--matmul", type=int, default=8192, help="rows of the product for comparison")
    given = options.parse_args()
    given.device = given.device or ("gpu" if gpus else "cpu")
    given.ranks = sorted(set(given.ranks or ([1, 2] if gpus != 1 else [1])))
    given.replay = sorted(set(given.replay))
    given.ways = [way for way in WAYS if way in given.ways]
    if given.sequences and len(given.sequences) != len(given.models):
        options.error(
            f"--sequences has {len(given.sequences)} numbers for {len(given.models)} models: one each"
        )
    if min(*given.ranks, *given.replay, given.steps, given.rounds, *(given.sequences or [1])) < 1:
        options.error("--ranks, --replay, --steps, --rounds and --sequences are 1 or more")
    if 0 < gpus < max(given.ranks):
        options.error(f"--ranks: {max(given.ranks)} ranks need as many GPUs, and there are {gpus}")
    if given.device == "gpu" and not gpus:
        options.error("--device gpu: TensorFlow sees no GPU; with --device cpu tables are in host memory")
    if not gpus and not given.smoke:
        options.error("TensorFlow finds no GPU, for which these sizes are meant: pass --smoke")
    return given


def main() -> None:
    """Measure each model, case by case."""
    given = arguments()
    common: dict[str, Any] = {
        "mean": 600,
        "longest": LONGEST,
        "exposures": 16,
        "most": sys.maxsize,
        "matmul": given.matmul,
        "batches": given.steps,
        "rounds": given.rounds,
        "depth": given.depth,
        "seconds": given.seconds,
        "timeout": given.timeout,
        "ways": given.ways,
        "network": given.network,
    }
    if given.smoke:
        MODELS["d512x3"] = (16, 1, 2, 6)
        common |= _SMALL
        given.models, given.sequences, given.heads, given.replay = ["d512x3"], None, None, [2, 4]
    notes = Notes(given.json, {"gmeta": gmeta.__version__, "gpu": gpu(), "device": given.device})
    complete = True
    for path, own in models(given):
        pool = {"pool": 4 * own["sequences"] * common["mean"]}
        complete &= measure(path, {**common, **own, **pool}, given, notes)
    report("A GRM on GPU ranks", list(notes.results.values()), given.json, **notes.facts)
    if not complete:
        raise SystemExit("some jobs failed, as reported above; the figures are of the others")


if __name__ == "__main__":
    main()
