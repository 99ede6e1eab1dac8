"""How fast HSTU trains on one GPU, embeddings included, and what share of the GPU's arithmetic that is.

    python tools/bench/gpu_hstu.py --json FILE

A step: ids of a batch of jagged histories (lognormal lengths of mean 600, at most 3,000; ids by Zipf's law
over 10 million items) are looked up in a dynamic table on the GPU, which makes new rows; blocks of HSTU in
bfloat16, in the research form without relative biases; the next item is distinguished from one of the batch;
gradients; Adam on the blocks' weights and fused Adam on the table's rows. The time includes all of this.

train   tokens a second
mfu     the operations that a step needs over those of a large product of bfloat16 matrices in the same time,
        in percent. Counted: products forward (10 d^2 a token and block, 2 operations each way) and twice that
        backward; attention 4 d operations for each visible pair, and 2.5 times that backward; no norms,
        activations, losses, table or optimizer, and nothing that is computed twice
matmul  that product, in TFLOP/s
parts   milliseconds of a step without the backward pass, and of the table alone
plain   milliseconds of attention forward and back as TensorFlow's own ops compute it, beside the native op
length  for each of --long: tokens a second of training on one history of this length, and the GiB that
        TensorFlow uses at most, with recompute="block" beside without it
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, Literal

import gmeta  # before TensorFlow: it selects Keras
from gmeta.layers import HSTU, record_lookups
from gmeta.ops import AttentionMask, HashTable, Jagged, hstu_attention
from gmeta.ops.table.portable_tables import portable_ops
from gmeta.optimizers import Adam
from gmeta.training.joint_optimizer import JointOptimizer

import numpy as np
import tensorflow as tf
from harness import Result, parser, report

MODELS = {"d512x3": (512, 3, 4), "d1024x22": (1024, 22, 8)}  # width, blocks, heads
LONGEST, ITEMS = 3000, 10_000_000
_PRODUCTS = 64  # of a call: 0.1 s on an H200, beside which the call itself takes nothing
BATCH = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64)]  # ids, offsets


def offsets_of(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Offsets of histories of about this many tokens in total."""
    lengths = np.clip(rng.lognormal(np.log(600) - 0.32, 0.8, 4 * tokens // 600), 1, LONGEST).astype(np.int64)
    lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), tokens)))]
    return np.concatenate([[0], np.cumsum(lengths)])


def batch_of(tokens: int, seed: int) -> tuple[tf.Tensor, tf.Tensor, int]:
    """Ids and offsets of about this many tokens, and the number of visible pairs."""
    rng = np.random.default_rng(seed)
    offsets = offsets_of(tokens, rng)
    lengths = np.diff(offsets)
    ids = (rng.zipf(1.1, offsets[-1]) * 2654435761) % ITEMS
    return tf.constant(ids), tf.constant(offsets), int((lengths * (lengths + 1) // 2).sum())


def operations(dim: int, blocks: int, tokens: int, pairs: int) -> float:
    """Floating-point operations that training on a batch needs."""
    return blocks * (3 * 10.0 * dim * dim * tokens + 3.5 * 4.0 * dim * pairs)


class Trainer:
    """A model over a table, and its step."""

    def __init__(
        self, table: HashTable, blocks: int, heads: int, recompute: Literal["block"] | None = None
    ) -> None:
        self.table, dim = table, table.dim
        self.stack = HSTU(
            blocks=blocks,
            heads=heads,
            attention_dim=dim // heads,
            value_dim=dim // heads,
            max_length=LONGEST,
            recompute=recompute,
            bias_by_place=False,
            bias_by_time=False,
            dtype=tf.keras.mixed_precision.Policy("mixed_bfloat16"),
        )
        self.optimizer = tf.keras.optimizers.Adam(1e-4)
        # It updates all weights in one computation, as `fit` does.
        self.joint = JointOptimizer(self.optimizer, raises=False)

    def loss(self, rows: tf.Tensor, inverse: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
        """The loss of distinguishing the next item from another one."""
        items = tf.cast(tf.gather(rows, inverse), tf.bfloat16)
        seen = self.stack(Jagged(items, offsets), training=True).values[:-1]
        told, other = items[1:], tf.roll(items[1:], 777, axis=0)
        margin = tf.reduce_sum(tf.cast(seen * (told - other), tf.float32), axis=1)
        return tf.reduce_mean(tf.nn.softplus(-margin))

    @tf.function(input_signature=BATCH)
    def forward(self, ids: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
        """The loss on rows, which are made if they are missing."""
        lookup = self.table.lookup(ids)
        return self.loss(lookup.rows, lookup.inverse, offsets)

    @tf.function(input_signature=BATCH)
    def rows(self, ids: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
        """The table's part of a step alone."""
        lookup = self.table.lookup(ids)
        self.table.apply_gradients(lookup.keys, 0.0 * lookup.rows, finite=False, distinct=True)
        return tf.reduce_sum(lookup.rows[:1])

    @tf.function(input_signature=BATCH)
    def step(self, ids: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
        """Take a training step, and return the loss before it."""
        lookup = self.table.lookup(ids)
        loss, of_rows = self.train_model(lookup.rows, lookup.inverse, offsets)
        self.table.apply_gradients(lookup.keys, of_rows, finite=False, distinct=True)  # as `fit` does
        return loss

    def train_model(self, rows: tf.Tensor, inverse: tf.Tensor, offsets: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Train the blocks on rows, and return the loss before and the gradient of the rows."""
        with tf.GradientTape() as tape:
            tape.watch(rows)
            loss = self.loss(rows, inverse, offsets)
        weights = self.stack.trainable_variables
        of_rows, *of_weights = tape.gradient(loss, [rows, *weights])
        with record_lookups() as nothing:  # of collections; the table is trained by itself
            pass
        self.joint.step(of_weights, weights, nothing)
        return loss, of_rows


def seconds(run: Callable[[int], tf.Tensor], steps: int, warm_up: int = 3) -> float:
    """Median time of a step; its result is fetched, so that the device is done."""
    times = []
    for i in range(warm_up + steps):
        start = time.perf_counter()
        float(run(i))
        times.append(time.perf_counter() - start)
    return float(np.median(times[warm_up:]))


def matmul_rate(size: int) -> float:
    """Operations a second of a product of bfloat16 matrices."""
    a = tf.random.normal([size, size], dtype=tf.bfloat16)
    b = tf.random.normal(
        [size, size], stddev=size**-0.5, dtype=tf.bfloat16
    )  # so that products stay of a size

    @tf.function
    def product(step: tf.Tensor) -> tf.Tensor:
        c = a
        for _ in range(_PRODUCTS):
            c = tf.matmul(c, b)
        return tf.cast(c[0, 0], tf.float32)

    return _PRODUCTS * 2.0 * size**3 / seconds(lambda i: product(tf.constant(i)), 10)


def train(name: str, tokens: int, steps: int, device: str, rate: float) -> list[Result]:
    """Training one of the models."""
    dim, blocks, heads = MODELS[name]
    tf.keras.backend.clear_session()
    table = HashTable(dim, Adam(1e-3), seed=1, name="items", device=device)
    trainer = Trainer(table, blocks, heads)
    batches = [batch_of(tokens, seed) for seed in range(4)]
    of = lambda call: lambda i: call(*batches[i % 4][:2])  # noqa: E731
    whole = seconds(of(trainer.step), steps)
    forward = seconds(of(trainer.forward), steps)
    rows = seconds(of(trainer.rows), steps)
    mean = float(np.mean([ids.shape[0] for ids, *_ in batches]))
    needed = float(np.mean([operations(dim, blocks, ids.shape[0], pairs) for ids, _, pairs in batches]))
    loss = float(trainer.step(*batches[0][:2]))
    print(f"{name}: {mean:.0f} tokens a step, {whole * 1e3:.1f} ms, loss {loss:.3f}")
    path = f"gpu_hstu/{name}/tokens{tokens}"
    return [
        Result(f"{path}/train", mean / whole, "tokens/s"),
        Result(f"{path}/step", whole * 1e3, "ms"),
        Result(f"{path}/mfu", 100 * needed / whole / rate, "% of matmul"),
        Result(f"{path}/rate", needed / whole / 1e12, "TFLOP/s"),
        Result(f"{path}/parts/forward", forward * 1e3, "ms"),
        Result(f"{path}/parts/table", rows * 1e3, "ms"),
    ]


def long(name: str, length: int, steps: int, device: str) -> list[Result]:
    """Training one of the models on one long history, with its blocks recomputed and without."""
    dim, blocks, heads = MODELS[name]
    ids = tf.constant((np.random.default_rng(0).zipf(1.1, length) * 2654435761) % ITEMS)
    offsets = tf.constant([0, length], tf.int64)
    rates: dict[Literal["block"] | None, float] = {}
    memory: dict[Literal["block"] | None, float] = {}
    has_gpu = bool(tf.config.list_logical_devices("GPU"))
    for recompute in (None, "block"):
        tf.keras.backend.clear_session()
        table = HashTable(dim, Adam(1e-3), seed=1, name="items", device=device)
        trainer = Trainer(table, blocks, heads, recompute)
        trainer.step(ids, offsets)
        if has_gpu:
            tf.config.experimental.reset_memory_stats("GPU:0")
        rates[recompute] = length / seconds(lambda _, step=trainer.step: step(ids, offsets), steps, warm_up=1)
        if has_gpu:
            memory[recompute] = tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**30
    path = f"gpu_hstu/{name}/length{length}"
    found = [Result(f"{path}/train", rates["block"], "tokens/s", "all kept", rates[None])]
    if memory:
        found.append(Result(f"{path}/memory", memory["block"], "GiB", "all kept", memory[None]))
    return found


def plain(tokens: int, length: int, heads: int, width: int, steps: int) -> Result:
    """Attention forward and back in TensorFlow, native and in plain ops."""
    offsets = tf.range(0, tokens + 1, length, tf.int64)
    visible = AttentionMask().visible(offsets)
    q, k, v = (tf.random.normal([tokens, heads, width], dtype=tf.bfloat16) for _ in range(3))

    def attend(step: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out = hstu_attention(q, k, v, offsets, visible, scale=1 / length, alpha=width**-0.5)
            loss = tf.reduce_sum(tf.cast(out, tf.float32))
        found = [tf.convert_to_tensor(x) for x in tape.gradient(loss, [q, k, v])]
        return tf.add_n([tf.cast(x[0, 0, 0], tf.float32) for x in found])

    native = tf.function(attend)
    ours = seconds(lambda i: native(tf.constant(i)), steps)
    with portable_ops():
        other = tf.function(attend)
        theirs = seconds(lambda i: other(tf.constant(i)), steps)
    name = f"gpu_hstu/plain/attention/dim{width}/length{length}/tokens{tokens}"
    return Result(name, ours * 1e3, "ms", "plain TensorFlow", theirs * 1e3)


def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    options.add_argument("--tokens", type=int, default=65_536, help="tokens of a step")
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--long", nargs="*", type=int, default=[16_384, 65_536, 100_000])
    options.add_argument("--device", default="gpu", help="device of the table (default: %(default)s)")
    options.add_argument("--matmul", type=int, default=8192, help="rows of the product for comparison")
    args = options.parse_args()
    if args.smoke:
        MODELS.update(d512x3=(128, 2, 2), d1024x22=(128, 3, 1))
        args.tokens, args.steps, args.matmul, args.long = 1_500, 1, 256, [200]
    rate = matmul_rate(args.matmul)
    results = [Result("gpu_hstu/matmul", rate / 1e12, "TFLOP/s")]
    for name in args.models:
        results += train(name, args.tokens, args.steps, args.device, rate)
    for length in args.long:
        results += long(args.models[-1], length, min(args.steps, 3), args.device)
    results.append(plain(256, 64, 2, 64, 1) if args.smoke else plain(16_384, 1024, 4, 128, args.steps))
    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", "GPU") for gpu in gpus]
    report(__doc__.splitlines()[0], results, args.json, gmeta=gmeta.__version__, gpu=names)


if __name__ == "__main__":
    main()
