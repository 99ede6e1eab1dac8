"""A method or a baseline of a run on rows as a SavedModel of TensorFlow's own ops, for servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.row_formats import RowDtype
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.ranking.baselines import LEAST, NEAREST, Bilinear, Drift, Linear, Scorer
from gmeta.experiment.ranking.examples import FARTHEST, GAP, Encoding, Scale
from gmeta.experiment.ranking.models import ModelScorer
from gmeta.experiment.ranking.networks import IDS, NUMBERS, TIME, USER, SequenceModel
from gmeta.experiment.ranking.runs import Blended, columns_of, load_ranking
from gmeta.experiment.runs.all_runs import HeldModels, next_version
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.export.saved_model import Exported, export_model
from gmeta.export.signature import Signature
from gmeta.ops import hash_text

SCORE = "score"
"""The answer: a probability, or a value."""


@dataclass(frozen=True)
class Sent:
    """Rows as a server encodes them.

    Attributes:
      ids: Feature -> (rows,) the numbers of ids, or (rows, width) for a list; 0 is unknown or padding.
      numbers: (rows, columns) float32, scaled.
      times: (rows,) int64.
    """

    ids: Mapping[str, tf.Tensor]
    numbers: tf.Tensor
    times: tf.Tensor


_Served = Callable[[Sent], tf.Tensor]


def _held(values: Any) -> tf.Variable:
    return tf.Variable(np.asarray(values, np.float32), trainable=False)


@functools.singledispatch
def in_tensorflow(scorer: Any) -> _Served:
    """Return a scorer as a function of TensorFlow's own ops: rows -> (rows,) scores."""
    raise ConfigError(f"{type(scorer).__name__} can't be exported")


@in_tensorflow.register
def _bilinear(scorer: Bilinear) -> _Served:
    values = _values(scorer)
    return (lambda sent: _logits(values(sent))) if scorer.binary else values


def _values(scorer: Bilinear) -> _Served:
    bias, vectors, users = map(_held, (scorer.bias, scorer.vectors, scorer.users))

    def serve(sent: Sent) -> tf.Tensor:
        nothing = tf.zeros(tf.shape(sent.numbers)[:1], tf.int64)
        item, user = (nothing if name is None else sent.ids[name] for name in (scorer.item, scorer.user))
        found = scorer.mean + tf.gather(bias, item)
        return found + tf.reduce_sum(tf.gather(vectors, item) * tf.gather(users, user), axis=1)

    return serve


def _logits(values: tf.Tensor) -> tf.Tensor:
    rate = tf.clip_by_value(values, LEAST, 1 - LEAST)
    return tf.math.log(rate / (1 - rate))


@in_tensorflow.register
def _drift(scorer: Drift) -> _Served:
    base, binary = _values(scorer.base), scorer.base.binary
    clock, keys, splits, times = (
        tf.Variable(each, trainable=False)
        for each in (scorer.clock, scorer.keys, scorer.splits, scorer.times)
    )
    residuals, settings, last = _held(scorer.residuals), scorer.settings, len(scorer.times) - 1

    def serve(sent: Sent) -> tf.Tensor:
        user = sent.ids[scorer.user]
        key = user * (len(scorer.clock) + 1)
        key += tf.searchsorted(tf.convert_to_tensor(clock), sent.times, out_type=tf.int64)
        at = tf.searchsorted(tf.convert_to_tensor(keys), key, out_type=tf.int64)
        place = at[:, tf.newaxis] + tf.range(-NEAREST, NEAREST, dtype=tf.int64)
        there = place >= tf.gather(splits, user)[:, tf.newaxis]
        there &= place < tf.gather(splits, user + 1)[:, tf.newaxis]
        place = tf.clip_by_value(place, 0, last)
        away = tf.cast(tf.abs(tf.gather(times, place) - sent.times[:, tf.newaxis]), tf.float64)
        near = tf.where(there, tf.cast(tf.exp(-away / settings.scale), tf.float32), 0.0)
        total = tf.reduce_sum(near * tf.gather(residuals, place), axis=1)
        found = base(sent) + total / (settings.damping + tf.reduce_sum(near, axis=1))
        return _logits(found) if binary else found

    return serve


@in_tensorflow.register
def _linear(scorer: Linear) -> _Served:
    weights = {name: _held(each) for name, each in scorer.ids.items()}
    of_numbers = _held(scorer.numbers)

    def serve(sent: Sent) -> tf.Tensor:
        found = scorer.intercept + tf.linalg.matvec(sent.numbers, tf.convert_to_tensor(of_numbers))
        for name, each in weights.items():
            own = tf.gather(each, sent.ids[name])
            if own.shape.rank == 2:
                size = tf.reduce_sum(tf.cast(sent.ids[name] > 0, tf.float32), axis=1)
                own = tf.reduce_sum(own, axis=1) / tf.sqrt(tf.maximum(size, 1.0))
            found += own
        return found

    return serve


@in_tensorflow.register
def _model(scorer: ModelScorer) -> _Served:
    model, encoding = scorer.model, scorer.encoding
    layout = model.layout

    def serve(sent: Sent) -> tf.Tensor:
        keys = [sent.ids[name] + start for name, start in layout.single.items()]
        rows = tf.shape(sent.numbers)[0]
        inputs: dict[str, Any] = {
            IDS: tf.stack(keys, axis=1) if keys else tf.zeros([rows, 0], tf.int64),
            NUMBERS: sent.numbers,
        }
        for name, start in layout.lists.items():
            number = sent.ids[name]
            inputs[name] = tf.ragged.boolean_mask(number + start, number > 0)
        if isinstance(model, SequenceModel):
            inputs |= {USER: sent.ids[model.user], TIME: sent.times}
        found = model(inputs, training=False)[:, 0]
        return found if encoding.config.binary else encoding.mean + encoding.deviation * found

    return serve


@in_tensorflow.register
def _blended(scorer: Blended) -> _Served:
    parts = {name: in_tensorflow(each) for name, each in scorer.scorers.items()}
    blend = scorer.blend

    def serve(sent: Sent) -> tf.Tensor:
        found: Any = np.float32(blend.intercept)
        for name, weight, mean, deviation in blend.terms():
            found += np.float32(weight / deviation) * (parts[name](sent) - np.float32(mean))
        return found

    return serve


def export_ranking(
    run: RunFolder,
    out: Path,
    *,
    method: str | None = None,
    seed: int | None = None,
    version: int | None = None,
    row_dtype: RowDtype = "float32",
) -> Exported:
    """Write a method or a baseline to ``out/version`` for stock TensorFlow Serving.

    Its one signature, ``predict``, takes the columns that the method reads: (rows,) int64 ids, (rows, width)
    int64 for a list, padded with -1, and (rows,) float32 numbers. For columns that `gmeta prepare` hashed it
    takes texts, with lists padded with ``""``. It returns ``score`` (rows,): a probability, or a value. An id
    that isn't in the training data is unknown.

    Args:
      run: A fully trained run.
      out: The model's base path, in TensorFlow Serving's terms.
      method: Which method or baseline; None: the best in validation.
      seed: Which of its seeds; None: the first.
      version: None: one more than the highest existing version.
      row_dtype: How the model holds rows; the ``dtype`` of `gmeta.export.export_model`.

    Raises:
      ConfigError: There is no such method or seed, or the version exists.
      DataError: The run isn't fully trained.
    """
    trained = load_ranking(run)
    _, scorer = trained.choose(method, seed)
    folder = out / str(next_version(out) if version is None else version)
    encoding, config = trained.parts.encoding, trained.config
    serve, encode = in_tensorflow(scorer), _encoder(encoding)
    hashed, read = Manifest.load(run.load()[1]).roles.hashed, columns_of(scorer, config)
    inputs: dict[str, tf.TypeSpec] = {
        name: tf.TensorSpec(
            [None, None] if name in encoding.lists else [None], tf.string if name in hashed else tf.int64
        )
        for name in config.encoded
        if name in read or not read  # a scorer that reads nothing takes the number of rows from these
    }
    for name in config.numbers:
        if name in read:
            inputs.setdefault(name, tf.TensorSpec([None], tf.float32))
    if config.time in read:
        inputs.setdefault(config.time, tf.TensorSpec([None], tf.int64))

    def answer(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        scores = serve(encode(given))
        return {SCORE: tf.sigmoid(scores) if config.binary else scores}

    held = [each.model for each in _parts(scorer) if isinstance(each, ModelScorer)]
    return export_model(
        HeldModels(held, "ranking"),
        folder,
        signatures={"predict": Signature(answer, inputs)},
        dtype=row_dtype,
    )


def _parts(scorer: Scorer) -> list[Scorer]:
    return [scorer, *(scorer.scorers.values() if isinstance(scorer, Blended) else ())]


def _encoder(encoding: Encoding) -> Callable[[Mapping[str, Any]], Sent]:
    """Return `Encoding` as a function of TensorFlow's own ops, without ids of columns that aren't sent."""
    known = {name: tf.Variable(ids, trainable=False) for name, ids in encoding.ids.items()}

    def encode(given: Mapping[str, Any]) -> Sent:
        rows = tf.shape(next(iter(given.values())))[0]
        gaps = tf.fill([rows], np.float32(np.nan))
        numbers = [scale_numbers(scale, given.get(name, gaps)) for name, scale in encoding.scales.items()]
        return Sent(
            {name: number_ids(given[name], ids) for name, ids in known.items() if name in given},
            tf.stack(numbers, axis=1) if numbers else tf.zeros([rows, 0]),
            given.get(encoding.config.time, tf.zeros([rows], tf.int64)),
        )

    return encode


def number_ids(sent: tf.Tensor, known: tf.Variable) -> tf.Tensor:
    """Number ids, or texts by their hashes, from 1; 0 is an unknown id, or the padding of a list."""
    if sent.dtype == tf.string:
        numbers = number_ids(hash_text(sent), known)
        return numbers if sent.shape.rank == 1 else tf.where(sent == "", tf.zeros_like(numbers), numbers)
    ids: Ints | tf.Tensor = tf.convert_to_tensor(known)
    if not ids.shape[0]:
        return tf.zeros_like(sent)
    flat = tf.reshape(sent, [-1])
    place = tf.minimum(tf.searchsorted(ids, flat, out_type=tf.int64), int(ids.shape[0]) - 1)
    return tf.reshape(tf.where(tf.gather(ids, place) == flat, place + 1, 0), tf.shape(sent))


def scale_numbers(scale: Scale, values: tf.Tensor) -> tf.Tensor:
    """Scale numbers as `Scale` does, (rows,) float32."""
    found = tf.cast(values, tf.float64)
    missing = ~tf.math.is_finite(found) | (found <= GAP)
    found = tf.sign(found) * tf.math.log1p(tf.abs(found)) if scale.log else found
    scaled = tf.where(missing, tf.constant(0.0, tf.float64), (found - scale.mean) / scale.deviation)
    return tf.cast(tf.clip_by_value(scaled, -FARTHEST, FARTHEST), tf.float32)
