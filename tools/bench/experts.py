"""A mixture that computes only its chosen experts, compared with one that computes all.

    python tools/bench/experts.py --json FILE
    python tools/bench/experts.py --device GPU:0 --json FILE

Samples are drawn at random, and gates have their initial weights, so experts are used about equally. A
mixture of two tasks has experts of one hidden layer and an output, each as wide as the input.

train   median milliseconds of outputs and the gradients of the input and all weights, ``sparse=True``; its
        peer is the same layer with ``sparse=False``, from the same weights
infer   the same, of outputs alone

A GPU multiplies in TensorFloat-32, TensorFlow's default.

Names contain the number of experts, of experts that a task chooses, of samples of a batch, and their width.
Both forms must return the same outputs, or the benchmark fails.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
from gmeta.layers import MMoE  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from harness import Result, interleave, parser, report  # noqa: E402

TASKS = ["ctr", "cvr"]
CHOICES = [(4, 1), (4, 2), (8, 1), (8, 2), (16, 1), (16, 2), (64, 2)]
"""Experts, and how many a task chooses."""
SIZES = [(64, 64), (512, 64), (2048, 128), (8192, 64), (4096, 256)]
"""Samples, and their width."""
LARGE = [(8192, 512), (32768, 256)]
"""More sizes for a GPU, which the others leave idle."""


def make(experts: int, top_k: int, dim: int, sparse: bool) -> MMoE:
    """Make a mixture; equal arguments give equal weights."""
    options = {"units": [dim, dim], "top_k": top_k, "sparse": sparse, "report": None}
    mixture = MMoE(TASKS, experts=experts, **options)
    mixture.build([None, dim])
    return mixture


def train(mixture: MMoE, x: tf.Tensor) -> Any:
    """Compute outputs, and gradients."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = tf.stack(list(mixture(x).values()))
        loss = tf.reduce_sum(tf.square(out))
    return out, tape.gradient(loss, [x, *mixture.trainable_weights])


def infer(mixture: MMoE, x: tf.Tensor) -> Any:
    """Compute outputs."""
    return (tf.stack(list(mixture(x).values())),)


def measure(experts: int, top_k: int, samples: int, dim: int, rounds: int) -> list[Result]:
    """Compare the forms at one size."""
    x = tf.constant(np.random.default_rng(0).normal(size=(samples, dim)), tf.float32)
    mixtures = {form: make(experts, top_k, dim, form == "sparse") for form in ("sparse", "all")}
    results = []
    for name, work in (("train", train), ("infer", infer)):
        graphs: dict[str, Callable[..., Any]] = {
            form: tf.function(partial(work, mixture), input_signature=[tf.TensorSpec([None, dim])])
            for form, mixture in mixtures.items()
        }
        tf.config.experimental.enable_tensor_float_32_execution(False)  # of the comparison alone
        chosen, all_ = (graphs[form](x)[0] for form in ("sparse", "all"))
        np.testing.assert_allclose(chosen, all_, rtol=1e-3, atol=1e-4)
        tf.config.experimental.enable_tensor_float_32_execution(True)

        def run(_: int, graph: Callable[..., Any]) -> None:
            tf.nest.map_structure(lambda each: each[..., :1].numpy(), graph(x))  # waits for all of it

        contenders = {form: partial(run, graph=graph) for form, graph in graphs.items()}
        took = {form: 1e3 * seconds for form, seconds in interleave(contenders, rounds=rounds).items()}
        where = f"experts{experts}/k{top_k}/samples{samples}/dim{dim}"
        results.append(Result(f"experts/{name}/{where}", took["sparse"], "ms", "all experts", took["all"]))
    return results


def main() -> None:
    """Measure all sizes."""
    options = parser(__doc__)
    options.add_argument("--device", default="CPU:0", help="TensorFlow's name (default: %(default)s)")
    given = options.parse_args()
    large = LARGE if "GPU" in given.device.upper() else []
    choices, sizes = ([(4, 1)], [(16, 8)]) if given.smoke else (CHOICES, [*SIZES, *large])
    results: list[Result] = []
    with tf.device(given.device):
        for (experts, top_k), (samples, dim) in itertools.product(choices, sizes):
            results += measure(experts, top_k, samples, dim, given.rounds)
    report("Chosen experts beside all", results, given.json, device=given.device)


if __name__ == "__main__":
    main()
