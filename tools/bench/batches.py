"""How large batches near the limit of memory are: a fixed number of sequences, or as many as fit.

    python tools/bench/batches.py --json FILE
    python tools/bench/batches.py --device GPU:0 --dim 512 1024 --blocks 3 22 --json FILE
    python tools/bench/batches.py --base-mib 8192 --bytes-a-token 120000 --limit-gib 80 --split data/train
    python tools/bench/batches.py --tokens 69600 297600

MTGenRec's table 3. As in `gmeta.models.max_tokens`, training steps of `gmeta.models.GRM` on sequences of the
greatest length find T, the most tokens of a batch. Batches are then cut from sequences whose lengths have a
long tail (lognormal of sigma 0.9, cut to a mean of 570 and at most 3,000), or are those of a prepared split.
On a GPU the model computes in bfloat16.

fixed       batches of N sequences, the most that fit whatever their lengths: N times the longest is at most T
fixed_seen  batches of N sequences, the largest N for which any N neighbours of an epoch fit. N is known only
            afterwards, and in another order some N neighbours may not fit
dynamic     `gmeta.io.Balance` with T as its target and its `max_tokens`

max_tokens     T
bytes_a_token  the slope of the line through all measured peaks
sequences      of an average step
tokens         of an average step
memory         the peak of an average step, by the line, as a share of the limit
gain           how many more sequences a step has with dynamic batches
peak           with --steps: the highest of steps each way, on the largest batch and others, as a share of
               the limit
pace           tokens a second in these steps, each way for about as many tokens

On a CPU a peak is that of the process's resident memory over what it has before (`parts.batch_memory`), and
the limit is --limit-gib. With --base-mib and --bytes-a-token nothing is trained: the line is given, or T with
--tokens.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # before TensorFlow is imported
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from gmeta.io.readers.prepared_split import open_split
from gmeta.training.token_limit import MemoryLine, memory_limit, peak_memory
from support.reference.balance import prefix_batches

import numpy as np
import tensorflow as tf
from harness import Result, parser, report
from parts.balance_lengths import LONGEST, Lengths, lengths
from parts.batch_memory import host_memory, measured_limit, measured_steps
from parts.grm_throughput import BLOCKS, model

MIB, GIB = 2**20, 2**30


class Memory(NamedTuple):
    """What a batch takes, and how many bytes there are."""

    line: MemoryLine
    limit: float


def fixed_worst(most: int, longest: int) -> int:
    """The most sequences of a batch that fit if all are as long as any."""
    return most // longest


def fixed_seen(of: Lengths, most: int) -> int:
    """The most neighbours of an epoch that fit, wherever they begin."""
    sums = np.concatenate([[0], np.cumsum(of)])
    low, high = 0, len(of)
    while low < high:
        middle = (low + high + 1) // 2
        fits = (sums[middle:] - sums[:-middle]).max() <= most
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def fixed_batches(of: Lengths, count: int) -> list[Lengths]:
    """An epoch in batches of so many; what is left at its end isn't one."""
    return [of[begin : begin + count] for begin in range(0, len(of) - count + 1, count)] if count else []


def dynamic_batches(of: Lengths, most: int) -> list[Lengths]:
    """An epoch in batches of up to so many tokens, without the rest at its end."""
    counts = prefix_batches(zip(of.tolist(), of.tolist(), strict=True), target=most, max_tokens=most)
    return [of[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))][:-1]


def ways_of(of: Lengths, most: int, longest: int) -> dict[str, list[Lengths]]:
    """Way -> the batches of an epoch."""
    return {
        "fixed": fixed_batches(of, fixed_worst(most, longest)),
        "fixed_seen": fixed_batches(of, fixed_seen(of, most)),
        "dynamic": dynamic_batches(of, most),
    }


def results_of(case: str, ways: dict[str, list[Lengths]], memory: Memory | None) -> list[Result]:
    """What an epoch's batches are on the average."""
    results, sequences = [], {}
    for way, batches in ways.items():
        if not batches:
            raise SystemExit(f"{case}: there is no room for any {way} batch: raise the limit")
        sequences[way] = float(np.mean([len(batch) for batch in batches]))
        tokens = float(np.mean([batch.sum() for batch in batches]))
        results += [
            Result(f"batches/{case}/{way}/sequences", sequences[way], "a step"),
            Result(f"batches/{case}/{way}/tokens", tokens, "a step"),
        ]
        if memory is not None:
            used = (memory.line.base + memory.line.per_token * tokens) / memory.limit
            results.append(Result(f"batches/{case}/{way}/memory", 100 * used, "% of the limit"))
    for way in ("fixed", "fixed_seen"):
        gain = 100 * (sequences["dynamic"] / sequences[way] - 1)
        results.append(Result(f"batches/{case}/gain/over_{way}", gain, "% more sequences"))
    return results


def read_lengths(split: Path | None, longest: int, count: int) -> Lengths:
    """Of a prepared split's groups in the order of its shards, or drawn; at most the longest."""
    if split is None:
        return lengths(np.random.default_rng(1), count).clip(1, longest)
    every = np.concatenate(list(open_split(split).rows_of_groups())).clip(1, longest)
    return np.random.default_rng(1).permutation(every)  # a reader shuffles them


def arguments() -> argparse.Namespace:
    """What is measured, or given."""
    options = parser(__doc__)
    options.add_argument("--device", default="CPU:0", help="whose memory: CPU:0 (default), or a GPU, GPU:0")
    options.add_argument("--dim", type=int, nargs="+", default=[64], help="widths of the model")
    options.add_argument("--blocks", type=int, nargs="+", help=f"of each width (default: {BLOCKS})")
    options.add_argument("--share", type=float, default=0.95, help="of the limit (default: %(default)s)")
    options.add_argument("--limit-gib", type=float, help="memory; default: 2 on a CPU, on a GPU all of it")
    options.add_argument("--longest", type=int, default=LONGEST, help="tokens (default: %(default)s)")
    options.add_argument("--split", type=Path, help="a prepared split, FOLDER/SPLIT, for the lengths")
    options.add_argument("--steps", type=int, help="steps each way; default: 20 on a GPU, none on a CPU")
    options.add_argument("--base-mib", type=float, help="memory without a batch, in place of training")
    options.add_argument("--bytes-a-token", type=float, help="goes with --base-mib")
    options.add_argument("--tokens", type=int, nargs="+", default=[], help="T itself, in place of training")
    given = options.parse_args()
    if (given.base_mib is None) != (given.bytes_a_token is None):
        options.error("--base-mib and --bytes-a-token go together")
    if given.base_mib is not None and given.limit_gib is None:
        options.error("a given line needs --limit-gib, the memory that there is")
    if given.smoke:
        given.dim, given.longest, given.limit_gib, given.steps = [8], 100, 0.25, 1
    given.blocks = given.blocks or [BLOCKS] * len(given.dim)
    if len(given.blocks) != len(given.dim):
        options.error(f"--blocks has {len(given.blocks)} numbers for {len(given.dim)} widths: one each")
    if len(given.dim) > 1 and given.device.upper().startswith("CPU"):
        options.error("on a CPU --dim takes one: a process keeps memory of an earlier model")
    on_cpu = given.device.upper().startswith("CPU")
    if given.steps is None:
        given.steps = 0 if on_cpu else 20
    if given.limit_gib is None and on_cpu:
        given.limit_gib = 2
    return given


def of_model(dim: int, blocks: int, of: Lengths, given: argparse.Namespace) -> list[Result]:
    """Find the limit of a model by training it, and cut batches by it."""
    case, made = f"d{dim}" if blocks == BLOCKS else f"d{dim}x{blocks}", model("jagged", dim, blocks)
    longest, on_gpu = int(of.max()), not given.device.upper().startswith("CPU")
    limit = memory_limit(given.device) if given.limit_gib is None else GIB * given.limit_gib
    measure = peak_memory(given.device) if on_gpu else host_memory()
    sizes = [longest * n for n in (2, 4, 8)]
    found = measured_limit(made, longest, sizes, given.share * limit, measure)
    ways = ways_of(of, found.tokens, longest)
    results = [
        Result(f"batches/{case}/max_tokens", found.tokens, "tokens"),
        Result(f"batches/{case}/bytes_a_token", found.line.per_token, "bytes"),
        *results_of(case, ways, Memory(found.line, limit)),
    ]
    if given.steps:
        steps = measured_steps(made, ways, given.steps * found.tokens, given.rounds, measure)
        for way, (peak, pace) in steps.items():
            results += [
                Result(f"batches/{case}/{way}/peak", 100 * peak / limit, "% of the limit"),
                Result(f"batches/{case}/{way}/pace", pace, "tokens/s"),
            ]
    return results


def main() -> None:
    """Cut batches by the limit of each model, or by what is given."""
    given = arguments()
    of = read_lengths(given.split, given.longest, 2_000 if given.smoke else 200_000)
    longest, results = int(of.max()), []
    if given.base_mib is not None:
        memory = Memory(MemoryLine(MIB * given.base_mib, given.bytes_a_token), GIB * given.limit_gib)
        ways = ways_of(of, memory.line.tokens_at(given.share * memory.limit), longest)
        results += results_of("given", ways, memory)
    for most in given.tokens:
        results += results_of(f"tokens{most}", ways_of(of, most, longest), None)
    if not results:
        if not given.device.upper().startswith("CPU"):
            tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")  # what the GPU's kernels take
        sizes = zip(given.dim, given.blocks, strict=True)
        results = [result for dim, blocks in sizes for result in of_model(dim, blocks, of, given)]
    facts = {"longest": longest, "mean": float(of.mean()), "share": given.share, "device": given.device}
    report("Batches near the limit of memory", results, given.json, **facts)


if __name__ == "__main__":
    main()
