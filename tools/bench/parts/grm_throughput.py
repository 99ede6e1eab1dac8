"""Training steps of a GRM, and of the same model over padded sequences."""

from __future__ import annotations

from typing import Any

from gmeta.layers import HSTU, FeatureConfig
from gmeta.models import GRM

import numpy as np
import tensorflow as tf
from parts.balance_lengths import LONGEST, Lengths, lengths
from parts.padded_hstu import PaddedHSTU

BACKBONES = {"jagged": HSTU, "padded": PaddedHSTU}
ITEMS, EXPOSURES, SEQUENCES, BLOCKS, HEADS = 20_000, 16, 16, 2, 2
WIDEST = 256  # widest heads of the GPU's kernels


def model(form: str, dim: int, blocks: int = BLOCKS) -> GRM:
    """Make a model; all forms have the same initial weights."""
    heads = max(HEADS, dim // WIDEST)
    backbone = BACKBONES[form](
        blocks=blocks,
        heads=heads,
        attention_dim=dim // heads,
        value_dim=dim // heads,
        max_length=LONGEST,
        form="production",
        bias_by_place=False,
        bias_by_time=False,
    )
    made = GRM.of(
        [FeatureConfig("city", dim=8), FeatureConfig("item", dim=dim), FeatureConfig("action", dim=8)],
        contexts=["city"],
        history=["item", "action"],
        targets=["item"],
        dim=dim,
        backbone=backbone,
        report=None,
    )
    made.compile(tf.keras.optimizers.Adam(1e-3))
    return made


def batches(count: int, longest: int = LONGEST) -> tuple[tf.data.Dataset, int]:
    """Draw batches of `SEQUENCES` users each, with long-tailed lengths; also return their total tokens."""
    rng = np.random.default_rng(0)
    drawn = lengths(rng, count * SEQUENCES).clip(EXPOSURES + 2, longest).reshape(count, SEQUENCES)
    made = [batch(rng, of) for of in drawn]
    return dataset(made), int(drawn.sum())


def dataset(made: list[dict[str, Any]]) -> tf.data.Dataset:
    """Make a dataset of these batches, with unknown sizes."""
    spec = tf.nest.map_structure(
        lambda x: (
            tf.TensorSpec([None], x.dtype)
            if not isinstance(x, tf.RaggedTensor)
            else tf.RaggedTensorSpec([None, None], x.dtype)
        ),
        made[0],
    )
    return tf.data.Dataset.from_generator(lambda: iter(made), output_signature=spec).cache()


def batch(rng: np.random.Generator, tokens: Lengths) -> dict[str, Any]:
    """Draw users with these numbers of tokens: one of context, `EXPOSURES`, and the events of a history."""
    history = tokens - EXPOSURES - 1

    def events(high: int, of: Lengths, dtype: Any = np.int64) -> tf.RaggedTensor:
        return tf.RaggedTensor.from_row_lengths(rng.integers(0, high, of.sum()).astype(dtype), of)

    shown = np.full(len(history), EXPOSURES)
    with tf.device("CPU:0"):  # where a reader's batches are
        return {
            "task": tf.constant(rng.integers(0, 10**9, len(history))),
            "contexts": {"city": tf.constant(rng.integers(0, 100, len(history)))},
            "history": {"item": events(ITEMS, history), "action": events(4, history)},
            "targets": {"item": events(ITEMS, shown)},
            "labels": {name: events(2, shown, np.float32) for name in ("click", "buy")},
        }
