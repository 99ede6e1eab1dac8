"""A method or a baseline of a run as a SavedModel of TensorFlow's own ops, for servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from scipy import sparse

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.row_formats import RowDtype
from gmeta.experiment.next_item.blend import SEEN, Blended
from gmeta.experiment.next_item.counting import Constant, Pairs, Scorer, Solved
from gmeta.experiment.next_item.generative import SearchScorer, check_answer
from gmeta.experiment.next_item.models import OF_USER, USER, ModelScorer, TowerScorer
from gmeta.experiment.next_item.runs import load_catalogue
from gmeta.experiment.runs.all_runs import HeldModels, next_version
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.export.saved_model import Exported, export_model
from gmeta.export.signature import PADDING, TEXT_PADDING, Signature
from gmeta.ops import hash_text


@dataclass(frozen=True)
class Padded:
    """Histories as a server receives them.

    Attributes:
      numbers: (users, width) the items' numbers; -1 where there is none.
      times: (users, width), or None.
      users: (users,) ids, or None.
    """

    numbers: tf.Tensor
    times: tf.Tensor | None
    users: tf.Tensor | None = None

    @property
    def there(self) -> tf.Tensor:
        """(users, width) bool, true where there is an item."""
        return self.numbers >= 0

    @property
    def from_end(self) -> tf.Tensor:
        """(users, width) the place of an item, counted from the last one."""
        after = tf.cumsum(tf.cast(self.there, tf.int32), axis=1, exclusive=True, reverse=True)
        return tf.where(self.there, after, 0)

    def sums(self, weights: tf.Tensor, items: int) -> tf.Tensor:
        """Sum weights (users, width) by item: (users, items)."""
        places = tf.where(self.there)
        columns = tf.gather_nd(self.numbers, places)
        at = tf.stack([places[:, 0], columns], axis=1)
        shape = tf.stack([tf.shape(self.numbers, tf.int64)[0], tf.constant(items, tf.int64)])
        return tf.scatter_nd(at, tf.gather_nd(weights, places), shape)

    def seen(self, items: int) -> tf.Tensor:
        """Return a mask of the items in each history, (users, items) bool."""
        return self.sums(tf.ones_like(self.numbers, tf.float32), items) > 0

    def ragged(self) -> dict[str, tf.RaggedTensor]:
        """Return the columns that a model takes."""
        columns = {"item": self.numbers, **({} if self.times is None else {"time": self.times})}
        return {name: tf.ragged.boolean_mask(column, self.there) for name, column in columns.items()}


_Served = Callable[[Padded], tf.Tensor]


@functools.singledispatch
def in_tensorflow(scorer: Any, items: int) -> _Served:
    """Return a scorer as a function of TensorFlow's own ops: padded histories -> (users, items)."""
    raise ConfigError(f"{type(scorer).__name__} can't be exported")


@in_tensorflow.register
def _constant(scorer: Constant, items: int) -> _Served:
    scores = tf.Variable(scorer.of_items, trainable=False)
    return lambda asked: tf.tile(tf.convert_to_tensor(scores)[tf.newaxis], [tf.shape(asked.numbers)[0], 1])


@in_tensorflow.register
def _pairs(scorer: Pairs, items: int) -> _Served:
    if sparse.issparse(scorer.matrix):
        turned = scorer.matrix.T.tocsr().tocoo()
        indices = tf.Variable(np.stack([turned.row, turned.col], axis=1).astype(np.int64), trainable=False)
        values = tf.Variable(turned.data.astype(np.float32), trainable=False)

        def multiply(weights: tf.Tensor) -> tf.Tensor:
            matrix = tf.SparseTensor(indices.read_value(), values.read_value(), [items, items])
            return tf.transpose(tf.sparse.sparse_dense_matmul(matrix, weights, adjoint_b=True))

    else:
        matrix = tf.Variable(scorer.matrix, trainable=False)

        def multiply(weights: tf.Tensor) -> tf.Tensor:
            return tf.matmul(weights, tf.convert_to_tensor(matrix))

    def serve(asked: Padded) -> tf.Tensor:
        back = tf.cast(asked.from_end, tf.float32)
        weights = (back + 1.0) ** -scorer.decay
        if scorer.last:
            weights = tf.where(asked.from_end < scorer.last, weights, 0.0)
        return scorer.scale(multiply(asked.sums(weights, items)), tf)

    return serve


@in_tensorflow.register
def _solved(scorer: Solved, items: int) -> _Served:
    vectors = tf.Variable(scorer.vectors, trainable=False)
    als = scorer.als

    def serve(asked: Padded) -> tf.Tensor:
        every = tf.convert_to_tensor(vectors)
        gram = tf.matmul(every, every, transpose_a=True) + als.penalty * tf.eye(als.rank)

        def solve(of_user: tf.Tensor) -> tf.Tensor:
            own = tf.boolean_mask(every, of_user)
            left = gram + als.confidence * tf.matmul(own, own, transpose_a=True)
            right = (1 + als.confidence) * tf.reduce_sum(own, axis=0)
            return tf.linalg.cholesky_solve(tf.linalg.cholesky(left), right[:, tf.newaxis])[:, 0]

        users = tf.map_fn(solve, asked.seen(items), fn_output_signature=tf.TensorSpec([als.rank], tf.float32))
        return tf.matmul(users, every, transpose_b=True)

    return serve


@in_tensorflow.register
def _model(scorer: ModelScorer, items: int) -> _Served:
    model = scorer.model
    vectors = tf.Variable(model.item_vectors() / model.loss_of.temperature, trainable=False)

    def serve(asked: Padded) -> tf.Tensor:
        queries = model(asked.ragged(), training=False)
        scores = tf.matmul(queries, tf.convert_to_tensor(vectors), transpose_b=True)
        return scores + tf.where(asked.seen(items), model.repeat_bias, 0.0)

    return serve


@in_tensorflow.register
def _towers(scorer: TowerScorer, items: int) -> _Served:
    vectors = tf.Variable(scorer.model.item_vectors(), trainable=False)
    of_users = _columns_of_users(scorer)

    def serve(asked: Padded) -> tf.Tensor:
        columns = {**asked.ragged(), **({} if asked.users is None else {USER: asked.users})}
        columns |= {} if of_users is None else {OF_USER: of_users(asked.users)}
        queries = scorer.model(columns, training=False)
        return tf.matmul(queries, tf.convert_to_tensor(vectors), transpose_b=True)

    return serve


def _columns_of_users(scorer: TowerScorer) -> Callable[[tf.Tensor], tf.RaggedTensor] | None:
    """Return a function that maps users' ids to their columns; an unknown user has none."""
    if scorer.feed.columns is None or not scorer.feed.users:
        return None
    known = scorer.feed.columns.users.ids
    numbers, splits = scorer.feed.columns.users.choose(scorer.feed.users, known)
    ids, values, ends = (
        tf.Variable(each, trainable=False) for each in (known, numbers, np.append(splits, splits[-1]))
    )

    def find(users: tf.Tensor) -> tf.RaggedTensor:
        every = tf.convert_to_tensor(ids)
        place = tf.minimum(tf.searchsorted(every, users, out_type=tf.int64), len(known) - 1)
        place = tf.where(tf.gather(every, place) == users, place, len(known))
        return tf.gather(tf.RaggedTensor.from_row_splits(values.read_value(), ends.read_value()), place)

    return find


@in_tensorflow.register
def _search(scorer: SearchScorer, items: int) -> _Served:
    search = scorer.search(scorer.width(0))

    def serve(asked: Padded) -> tf.Tensor:
        numbers, scores = search(asked.ragged())
        there = tf.where(numbers >= 0)
        at = tf.stack([there[:, 0], tf.gather_nd(numbers, there)], axis=1)
        found = tf.fill(tf.stack([tf.shape(numbers)[0], items]), -np.inf)
        return tf.tensor_scatter_nd_update(found, at, tf.gather_nd(scores, there))

    return serve


@in_tensorflow.register
def _blended(scorer: Blended, items: int) -> _Served:
    parts = {name: in_tensorflow(each, items) for name, each in scorer.scorers.items()}
    blend = scorer.blend

    def serve(asked: Padded) -> tf.Tensor:
        found: Any = 0.0
        for name, weight, mean, deviation in blend.rows():
            if name == SEEN:
                found += np.float32(weight / deviation) * tf.cast(asked.seen(items), tf.float32)
            else:
                own = parts[name](asked)
                absent = tf.math.is_inf(own)  # as in `with_floor`
                lowest = tf.reduce_min(tf.where(absent, np.inf, own), axis=1, keepdims=True)
                own = tf.where(absent, tf.where(tf.math.is_inf(lowest), 0.0, lowest), own)
                found += np.float32(weight / deviation) * (own - np.float32(mean))
        return found

    return serve


def export_catalogue(
    run: RunFolder,
    out: Path,
    *,
    method: str | None = None,
    seed: int | None = None,
    version: int | None = None,
    k: int = 20,
    leave_out_seen: bool | None = None,
    row_dtype: RowDtype = "float32",
) -> Exported:
    """Write a method or a baseline to ``out/version`` for stock TensorFlow Serving.

    Its one signature, ``recommend``, takes histories: the item's column, (users, width) int64 ids in the
    order of time, padded with -1; ``time`` of the same shape if a model reads times; and ``user`` (users,)
    ids if a model reads them or the users' columns. A user who isn't in the training part has the initial
    row, and one who isn't in the data set has no columns. If `gmeta prepare` hashed the items, their column
    takes the texts instead, padded with ``""``. The signature returns ``items`` (users, k) ids, the likeliest
    first, and ``scores`` (users, k), and where the data set keeps them (`gmeta.core.data_manifest.Texts`),
    ``texts`` and ``titles`` (users, k) of the items, ``""`` for an item without one. Items of a history that
    aren't in the catalogue are skipped. Where fewer than k items remain, the item is -1.

    Args:
      run: A fully trained run.
      out: The model's base path, in TensorFlow Serving's terms.
      method: Which method or baseline; None: the best in validation.
      seed: Which of its seeds; None: the first.
      version: None: one more than the highest existing version.
      k: The number of items of an answer.
      leave_out_seen: Whether to leave out the items of a history; None: as in the run's measurement.
      row_dtype: How the model holds rows; the ``dtype`` of `gmeta.export.export_model`.

    Raises:
      ConfigError: There is no such method or seed, the version exists, or the catalogue, or the beam of a
        search, has fewer than k items.
      DataError: The run isn't fully trained.
    """
    trained = load_catalogue(run)
    _, scorer = trained.choose(method, seed)
    leave_out_seen = not trained.config.seen if leave_out_seen is None else leave_out_seen
    folder = out / str(next_version(out) if version is None else version)
    cuts, item = trained.cuts, trained.config.item
    if k > cuts.items:
        raise ConfigError(f"k must be at most {cuts.items}, the catalogue's size, got {k}")
    check_answer(scorer, k)
    held = [
        each.model for each in _parts(scorer) if isinstance(each, ModelScorer | TowerScorer | SearchScorer)
    ]
    timed = any(model.time is not None for model in held)
    of_users = any({USER, OF_USER} & {*getattr(model, "user_columns", ())} for model in held)
    serve = in_tensorflow(scorer, cuts.items)
    ids = tf.Variable(cuts.ids, trainable=False)
    hashed = item in Manifest.load(run.load()[1]).roles.hashed
    inputs: dict[str, tf.TypeSpec] = {item: tf.TensorSpec([None, None], tf.string if hashed else tf.int64)}
    with tf.device("CPU:0"):  # no other device holds strings
        texts = {
            f"{kind}s": tf.Variable([text or "" for text in trained.texts.find(item, cuts.ids, kind)])
            for kind in trained.texts.kinds(item)
        }
    if item in {*(["time"] * timed), *([USER] * of_users)}:
        raise ConfigError(
            f"the column of items is called {item!r}, as another input of this model: prepare the data with "
            "another name for it"
        )
    if timed:
        inputs["time"] = tf.TensorSpec([None, None], tf.int64)
    if of_users:
        inputs[USER] = tf.TensorSpec([None], tf.int64)

    def answer(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        sent, known = given[item], tf.convert_to_tensor(ids)
        if hashed:
            sent = tf.where(sent == TEXT_PADDING, tf.constant(PADDING, tf.int64), hash_text(sent))
        place = tf.minimum(tf.searchsorted(known, tf.reshape(sent, [-1]), out_type=tf.int64), cuts.items - 1)
        place = tf.reshape(place, tf.shape(sent))
        asked = Padded(
            tf.where(tf.gather(known, place) == sent, place, -1), given.get("time"), given.get(USER)
        )
        scores = serve(asked)
        if leave_out_seen:
            scores = tf.where(asked.seen(cuts.items), -np.inf, scores)
        best, chosen = tf.math.top_k(scores, k)
        none = tf.math.is_inf(best)
        items = tf.where(none, tf.constant(-1, tf.int64), tf.gather(known, chosen))
        with tf.device("CPU:0"):
            named = {name: tf.where(none, "", tf.gather(own, chosen)) for name, own in texts.items()}
        return {"items": items, "scores": best, **named}

    return export_model(
        HeldModels(held, "ranker"),
        folder,
        signatures={"recommend": Signature(answer, inputs)},
        text_ids=False,
        dtype=row_dtype,
    )


def _parts(scorer: Scorer) -> list[Scorer]:
    return [scorer, *(scorer.scorers.values() if isinstance(scorer, Blended) else ())]
