"""Encodes a task's deltas as one string in a graph, which `adapt` answers and `predict_with` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.core.graph.conditions import assert_first
from gmeta.export.safetensors_graph import Decoder, encode
from gmeta.models import MetaModel
from gmeta.models.meta.adapter import checksum
from gmeta.models.meta.adapter.deltas import DIVERGED, TaskDeltas
from gmeta.models.meta.adapter.fast_weights import FORMAT, KEYS, ROWS, VERSION, DeltaDtype, metadata
from gmeta.models.meta.adapter.origin import fingerprint
from gmeta.models.meta.learner.checks import check_compiled
from gmeta.models.meta.learner.task_view import row_names

WEIGHTS = "weights_bytes"
"""The name of a task's deltas on the wire. Over REST, values whose name ends so are base64."""

_ADAPT_AGAIN = "adapt the task again, by the signature `adapt`"

Stale = Literal["refuse", "apply"]


class DeltaStrings:
    """Writes and reads the bytes of `gmeta.models.FastWeights` with TensorFlow's ops.

    Args:
      model: The model, compiled.
      steps: Number of inner steps; None: ``inner.steps_in("serving")``.
      dtype: The dtype of the deltas that are written.
      stale: What to do with deltas from other shared weights.

    Attributes:
      steps: Number of inner steps.

    Raises:
      ConfigError: The model isn't compiled, or a setting has an unknown value.
    """

    def __init__(self, model: MetaModel, steps: int | None, dtype: DeltaDtype, stale: Stale) -> None:
        self.steps = model.inner.steps_in("serving") if steps is None else whole_number("steps", steps)
        for name, given, known in (("dtype", dtype, DeltaDtype), ("stale", stale, Stale)):
            if given not in get_args(known):
                raise ConfigError(f"{name} must be {' or '.join(map(repr, get_args(known)))}, got {given!r}")
        check_compiled(model.learner)
        here = fingerprint(model.learner).numpy().decode()
        self._model, self._dtype = model, dtype
        self._about = metadata(model.name, model.inner.algorithm, self.steps, here)
        self._expected = here if stale == "refuse" else None

    def encode(self, deltas: TaskDeltas, given: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Encode the deltas of one task, () string.

        Args:
          deltas: The deltas.
          given: The numbers that the task has adapted to, by name.

        Raises:
          InvalidArgumentError: The inner steps have diverged, or the dtype can't hold a delta.
        """
        ranges = [part for name, numbers in given.items() for part in (name, *_range(numbers))]
        told = [f"adapt: the {self.steps} inner steps diverge on samples with", *ranges, DIVERGED]
        deltas = assert_first(deltas, deltas.sound, told)
        tensors = {name: tf.cast(delta[0], self._dtype) for name, delta in deltas.weights.items()}
        for name, moved in deltas.rows.items():
            tensors |= {name + KEYS: moved.keys, name + ROWS: tf.cast(moved.deltas, self._dtype)}
        if self._dtype == "float16":
            numbers = tf.concat(
                [tf.reshape(each, [-1]) for each in tensors.values() if each.dtype == tf.float16], 0
            )
            told = ["adapt: float16 ends at 65,504, and a delta is larger: export with dtype float32"]
            tensors = assert_first(tensors, tf.math.is_finite(numbers), told)
        return checksum.seal(encode(tensors, {**self._about, checksum.NAME: checksum.NONE}))

    def decode(self, data: tf.Tensor) -> tuple[dict[str, tf.Tensor], dict[str, tuple[tf.Tensor, tf.Tensor]]]:
        """Decode the deltas of weights, and the keys and deltas of rows.

        It refuses deltas from other shared weights than these, unless ``stale`` is ``"apply"``.
        """
        model, here = self._model, self._expected
        decoder = Decoder(data, WEIGHTS, _ADAPT_AGAIN)
        decoder.expect("format", FORMAT, "is not what `adapt` answers")
        decoder.expect("version", VERSION, f"is not version {VERSION} of the format")
        decoder.expect_whole()
        if here is not None:
            decoder.expect("fingerprint", here, f"has deltas from other shared weights than these, {here}")
        deltas = {
            name: decoder.tensor(name, tf.float32, variable.shape)
            for name, variable in model.learner.adapted_weights().items()
        }
        rows = {}
        if model.inner.adapts_embeddings:
            for name, merged in zip(row_names(model.collection), model.collection.merged, strict=True):
                keys = decoder.tensor(name + KEYS, tf.int64, tf.TensorShape([None]))
                rows[name] = keys, decoder.tensor(name + ROWS, tf.float32, tf.TensorShape([None, merged.dim]))
        squares = [tf.nn.l2_loss(each) for each in (*deltas.values(), *(moved for _, moved in rows.values()))]
        told = [f"{WEIGHTS} holds NaN, infinity, or numbers whose squares overflow: {_ADAPT_AGAIN}"]
        return (
            assert_first((deltas, rows), tf.math.is_finite(tf.add_n(squares)), told)
            if squares
            else (deltas, rows)
        )


def _range(numbers: tf.Tensor) -> tuple[Any, ...]:
    return "from", tf.reduce_min(numbers), "to", tf.reduce_max(numbers)
