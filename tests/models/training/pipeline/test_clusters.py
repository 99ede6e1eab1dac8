"""Micro-batches of samples that share keys: the step stays that of the batch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.core.errors import ConfigError
from gmeta.ops import Jagged
from gmeta.training.windows import cluster, column_keys, even_units, take_units
from support.pipeline_runs import differences, distances, make_model, train_at_depth

LIMIT = 1e-6  # as of micro-batches in the order of the batch: sums are made in another order


@functools.cache
def train(kind, depth=0, micro_batches=1, cluster=False):
    return train_at_depth(
        kind,
        depth,
        micro_batches=micro_batches,
        cluster=cluster,
        dropout=0.0,
        epochs=1,
        fit={"steps_per_epoch": 5},
        optimizer=tf.keras.optimizers.SGD(0.05),
    )


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        # Quick: ctr-2, and test_units_may_be_taken_in_any_order for units of several samples.
        ("ctr", 2),
        *(pytest.param(k, 1, marks=pytest.mark.slow) for k in ("maml", "towers", "rows", "grm", "next item")),
    ],
)
@pytest.mark.shown_by("test_samples_of_equal_keys_come_into_one_part")
def test_a_step_of_clusters_is_the_step_of_the_batch_at_every_depth(kind, depth):
    found = train(kind, depth, 2, cluster=True)
    apart = distances(train(kind), found)
    assert {name: each for name, each in apart.items() if not each <= LIMIT} == {}
    assert differences(train(kind, 0, 2, cluster=True), found) == []


def test_each_form_of_a_column_gives_its_entries_and_their_rows():
    ragged = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    deep = tf.ragged.constant([[[1], [2, 3]], [], [[4]]], dtype=tf.int64)
    columns = {
        "ragged": (ragged, [0, 0, 2]),
        "deep": (deep, [0, 0, 0, 2]),
        "sparse": (ragged.to_sparse(), [0, 0, 2]),
        "jagged": (Jagged(ragged.values, ragged.row_splits), [0, 0, 2]),
        "dense": (tf.constant([[1, 2], [3, 4], [1, 2]]), [0, 0, 1, 1, 2, 2]),
        "text": (tf.constant(["a", "b", "a"]), [0, 1, 2]),
        "numbers": (tf.constant([0.5, 0.5, 0.5]), []),
    }
    for name, (column, rows) in columns.items():
        keys, found = column_keys({name: column, "left out": None})
        assert found.numpy().tolist() == rows, name
        assert len(keys) == len(rows)
    keys, _ = column_keys({"a": tf.constant([1, 2, 1]), "b": tf.constant([1, 1, 2])})
    assert len(np.unique(keys)) == 4  # a column's numbers are its own


def test_samples_of_equal_keys_come_into_one_part():
    model, _ = make_model("ctr")
    user = tf.constant([3, 5, 3, 5, 3, 5], tf.int64)
    data = ({"user": user}, tf.range(6.0))
    arranged, label = cluster(model, data, 2)
    assert arranged["user"].numpy().tolist() == [3, 3, 3, 5, 5, 5]
    assert label.numpy().tolist() == [0, 2, 4, 1, 3, 5]


def test_units_may_be_taken_in_any_order():
    ragged = tf.ragged.constant([[1, 2], [], [3]], dtype=tf.int64)
    order = tf.constant([2, 0, 1], tf.int64)
    data = {"ragged": ragged, "sparse": ragged.to_sparse(), "dense": tf.constant([7, 8, 9])}
    taken = take_units(data, order)
    assert taken["ragged"].to_list() == [[3], [1, 2], []]
    assert tf.RaggedTensor.from_sparse(taken["sparse"]).to_list() == [[3], [1, 2], []]
    assert taken["dense"].numpy().tolist() == [9, 7, 8]
    assert [len(part) for part in even_units(tf.constant(3, tf.int64), 2)] == [2, 1]


def test_clusters_of_one_part_are_refused():
    with pytest.raises(ConfigError, match="there is only one: give micro_batches=2 to 8"):
        gmeta.Pipeline(cluster=True)
    with pytest.raises(ConfigError, match="cluster must be True or False, got 1"):
        gmeta.Pipeline(micro_batches=2, cluster=1)
    pipeline = gmeta.Pipeline(0, 2, cluster=True)
    assert gmeta.Pipeline.from_config(pipeline.get_config()) == pipeline


def test_negatives_of_a_users_place_are_refused():
    model, batches = make_model("next item of users")
    model.compile("sgd", pipeline=gmeta.Pipeline(0, 2, cluster=True))
    with pytest.raises(ConfigError, match="negatives_per='user' draws negatives for a user's place"):
        model.fit(next(batches()), verbose=0)
