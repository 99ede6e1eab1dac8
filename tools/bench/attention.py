"""HSTU's attention over jagged sequences, beside the same in plain TensorFlow.

    python tools/bench/attention.py --json FILE

native  `gmeta.ops.hstu_attention`
plain   `gmeta.ops.jagged_attention.padded_attention`: sequences padded to the longest, scores of all
        pairs, a mask; what users write without a native op

forward, train  milliseconds of the outputs alone, and of outputs and all gradients, for 4,096 tokens; 4 heads
                of 64; causal. L512: sequences of that length each. jagged: a long tail of lengths (mean 570,
                at most 3,000), which padding makes as long as the longest. rab: with biases of place and time
memory          peak MiB of one training pass over a single sequence, above the memory before it, in a
                separate process

Outputs and gradients of both are compared before anything is timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2
from gmeta.ops import AttentionMask, RelativeBias, hstu_attention
from gmeta.ops.jagged_attention import padded_attention

import numpy as np
import tensorflow as tf
from harness import Result, interleave, parser, report
from parts.balance_lengths import Lengths, lengths
from parts.meta.memory import status_kib

HEADS, WIDTH, LONGEST = 4, 64, 3000
FORMS = {"native": hstu_attention, "plain": padded_attention}


class Attention:
    """One set of sequences, attended by a form."""

    def __init__(self, form: str, of: Lengths, rab: bool) -> None:
        rng = np.random.default_rng(0)
        offsets = np.cumsum([0, *of])
        shape = (4, int(offsets[-1]), HEADS, WIDTH)
        *self.qkv, self.upstream = tf.unstack(tf.constant(rng.normal(size=shape), tf.float32))
        times = tf.constant(np.sort(rng.integers(0, 2**31, offsets[-1])), tf.int64)
        tables = (rng.normal(size=2 * LONGEST - 1), rng.normal(size=129)) if rab else ()
        self.tables = [tf.constant(table, tf.float32) for table in tables]
        offsets = tf.constant(offsets, tf.int64)
        visible = AttentionMask().visible(offsets)

        def forward(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, tables: list[tf.Tensor]) -> tf.Tensor:
            bias = RelativeBias(*tables, times, times) if tables else None
            return FORMS[form](q, k, v, offsets, visible, scale=1 / LONGEST, alpha=WIDTH**-0.5, bias=bias)

        def train(q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, tables: list[tf.Tensor]) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch([q, k, v, tables])
                out = forward(q, k, v, tables)
            found = tf.nest.flatten(tape.gradient(out, [q, k, v, tables], self.upstream))
            return [out, *map(tf.convert_to_tensor, found)]

        self._functions: dict[str, Callable[..., Any]] = {
            "forward": tf.function(forward),
            "train": tf.function(train),
        }

    def run(self, what: str, _: int = 0) -> list[Any]:
        """All results, on the host; they are the same in every round."""
        return [each.numpy() for each in tf.nest.flatten(self._functions[what](*self.qkv, self.tables))]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    """Compare both forms up to the rounding of long float32 sums, relative to the largest number."""
    for one, other in zip(ours, theirs, strict=True):
        away = np.abs(one - other).max() / np.abs(other).max()
        assert away < 1e-4, f"the forms differ by {away:.2g}"


def time_forms(name: str, of: Lengths, rab: bool, rounds: int) -> list[Result]:
    """Milliseconds of both forms."""
    forms = {form: Attention(form, of, rab) for form in FORMS}
    assert_same(*(attention.run("train") for attention in forms.values()))
    results = []
    for what in ("forward", "train"):
        calls = {form: partial(attention.run, what) for form, attention in forms.items()}
        seconds = interleave(calls, rounds=rounds)
        native, plain = (1e3 * seconds[form] for form in FORMS)
        results.append(Result(f"attention/{name}/{what}", native, "ms", "plain", plain))
    return results


def peak_mib(form: str, length: int) -> float:
    """Peak memory of a training pass."""
    words = [sys.executable, __file__, "--peak", form, str(length)]
    run = subprocess.run(words, capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed:\n{run.stderr[-2000:]}")
    return float(json.loads(run.stdout.splitlines()[-1]))


def print_peak(form: str, length: int) -> None:
    """In the process: let libraries allocate on a short sequence, reset the peak, run."""
    attentions = [Attention(form, np.array([size]), rab=True) for size in (8, length)]
    for attention in (attentions[0], attentions[0]):
        attention.run("train")
    before = status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here: proc(5)
    attentions[1].run("train")
    print(json.dumps((status_kib("VmHWM") - before) / 1024))


def main() -> None:
    """Measure memory, in separate processes, then times."""
    if sys.argv[1:2] == ["--peak"]:
        print_peak(sys.argv[2], int(sys.argv[3]))
        return
    given = parser(__doc__).parse_args()
    tokens = 64 if given.smoke else 4096
    drawn = lengths(np.random.default_rng(3), 64)
    long_tail = drawn[: int(np.searchsorted(np.cumsum(drawn), tokens)) + 1]
    each = 16 if given.smoke else 512
    sets = {f"L{each}": np.full(tokens // each, each), "jagged": long_tail[:1] if given.smoke else long_tail}
    memory, results = [], []
    for length in (64,) if given.smoke else (512, 1024, 2048, 4096):
        peaks = {form: peak_mib(form, length) for form in FORMS}
        memory.append(Result(f"attention/memory/L{length}", peaks["native"], "MiB", "plain", peaks["plain"]))
    for name, of in sets.items():
        for rab in (False, True):
            results += time_forms(f"{name}/rab" if rab else name, of, rab, given.rounds)
    report("Attention", [*results, *memory], given.json)


if __name__ == "__main__":
    main()
