import re

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig, record_lookups
from gmeta.optimizers import SGD
from gmeta.policies import LRU, CountAdmission, TwoPrecisions

START = Normal(0.0, 1.0)


def collection(combiner="mean", **options):
    return EmbeddingCollection(
        [
            FeatureConfig("user", TableConfig("user", 4, initializer=START)),
            FeatureConfig("item", TableConfig("item", 4, initializer=START)),
            FeatureConfig("tags", TableConfig("tags", 4, initializer=START), combiner=combiner),
            FeatureConfig("wide", TableConfig("wide", 6, initializer=START)),
        ],
        **options,
    )


def batch(user=(1, 2), item=(1, 3), tags=((5, 6), ()), wide=(9, 9)):
    return {
        "user": tf.constant(user, tf.int64),
        "item": tf.constant(item, tf.int64),
        "tags": tf.ragged.constant(tags, dtype=tf.int64, ragged_rank=1),
        "wide": tf.constant(wide, tf.int64),
    }


def row(layer, feature, raw):
    """The stored row of one raw id, read past the collection."""
    for table, merged in zip(layer.tables, layer.merged, strict=True):
        for config in merged.features:
            if config.name == feature:
                return table.lookup([merged.key_prefix(config) | raw], insert=False).rows[0].numpy()
    raise KeyError(feature)


@given(
    tags=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=5),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
)
def test_pooling_of_ragged_ids(tags, combiner):
    layer = collection(combiner)
    n = len(tags)
    vectors = layer.embed(layer.lookup(batch(user=range(n), item=range(n), tags=tags, wide=range(n))))
    for ids, vector in zip(tags, vectors["tags"].numpy(), strict=True):
        rows = np.array([row(layer, "tags", raw) for raw in ids]).reshape(-1, 4)
        scale = {"sum": 1.0, "mean": max(len(ids), 1), "sqrtn": max(len(ids), 1) ** 0.5}[combiner]
        np.testing.assert_allclose(vector, rows.sum(axis=0) / scale, rtol=1e-6, atol=1e-6)


def test_equal_ids_of_different_tables_have_different_rows():
    vectors = collection()(batch(user=[1, 1], item=[1, 1]))
    assert not np.allclose(vectors["user"], vectors["item"])


def test_one_native_lookup_for_each_merged_table_and_each_row_once():
    layer = collection()
    lookup = layer.lookup(batch(user=[7, 7], tags=[[5], [5, 5]]))
    narrow, wide = layer.tables
    # user 7, items 1 and 3, tag 5 | wide 9
    assert [int(rows.shape[0]) for rows in lookup.rows] == [4, 1]
    assert int(narrow.statistics().misses) == 4
    assert int(wide.statistics().misses) == 1


def test_gradients_reach_the_rows_and_repeated_ids_are_summed():
    layer = collection(optimizer=SGD(1.0))
    ids = batch(user=[7, 7], item=[1, 3], tags=[[5, 6], [5]])
    before = {key: row(layer, *key) for key in [("user", 7), ("item", 1), ("tags", 5), ("tags", 6)]}
    lookup = layer.lookup(ids)
    with tf.GradientTape() as tape:
        tape.watch(lookup.rows)
        loss = tf.reduce_sum(layer.concat(lookup))
    layer.apply_gradients(lookup, tape.gradient(loss, lookup.rows))
    # user 7 stands there twice; tag 5 is half of one mean and all of another; tag 6 is half of one.
    for key, slope in {("user", 7): 2.0, ("item", 1): 1.0, ("tags", 5): 1.5, ("tags", 6): 0.5}.items():
        np.testing.assert_allclose(row(layer, *key), before[key] - slope, rtol=1e-5)


def test_any_number_of_lookups_in_a_step_inside_nested_tapes():
    layer = collection(optimizer=SGD(1.0))
    first, second = layer.lookup(batch(user=[1, 2])), layer.lookup(batch(user=[2, 3]))
    with tf.GradientTape() as outer:
        outer.watch((first.rows, second.rows))
        with tf.GradientTape() as inner:
            inner.watch(first.rows)
            energy = tf.reduce_sum(layer.embed(first)["user"] ** 3)
        slope = tf.convert_to_tensor(inner.gradient(energy, first.rows)[0])
        loss = tf.reduce_sum(slope) + tf.reduce_sum(layer.embed(second)["user"])
    first_rows, second_rows = outer.gradient(loss, (first.rows, second.rows))
    # d/dx of the sum of 3 x^2 is 6 x at the user rows of the first lookup, and 1 at those of the second.
    np.testing.assert_allclose(
        tf.gather(tf.convert_to_tensor(first_rows[0]), first.positions["user"]),
        6 * layer.embed(first)["user"],
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        tf.gather(tf.convert_to_tensor(second_rows[0]), second.positions["user"]), np.ones((2, 4))
    )


def test_reading_stores_nothing():
    layer = collection()
    first = layer(batch())["user"]
    assert [int(table.size()) for table in layer.tables] == [0, 0]
    with record_lookups():
        trained = layer(batch(), training=True)["user"]
    np.testing.assert_array_equal(trained, first)  # the row it starts with
    assert [int(table.size()) for table in layer.tables] == [6, 1]


def test_an_empty_batch():
    vectors = collection()(batch(user=[], item=[], tags=(), wide=[]))
    assert {name: vector.shape.as_list() for name, vector in vectors.items()} == {
        "user": [0, 4],
        "item": [0, 4],
        "tags": [0, 4],
        "wide": [0, 6],
    }


@pytest.mark.parametrize("bad", [-1, 1 << 61, -(1 << 63)])
@pytest.mark.parametrize("traced", [False, True])
def test_an_id_out_of_range_names_feature_and_limit(bad, traced):
    layer = collection()
    lookup = tf.function(layer.lookup) if traced else layer.lookup
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"feature 'item': id {bad} at position 1 of 2 is outside \[0, {1 << 61}\)",
    ):
        lookup(batch(item=[3, bad]))


def test_inputs_that_do_not_fit_name_the_feature():
    layer = collection()
    with pytest.raises(
        ConfigError, match=r"feature 'tags' has combiner='mean' .* got a Tensor of shape \(2,\)"
    ):
        layer.lookup({**batch(), "tags": tf.constant([1, 2])})
    with pytest.raises(ConfigError, match="feature 'wide' is missing"):
        layer.lookup({name: ids for name, ids in batch().items() if name != "wide"})


def test_admission_and_eviction_reach_the_tables():
    layer = EmbeddingCollection(
        [
            FeatureConfig("rare", TableConfig("rare", 4, initializer=START, admission=CountAdmission(2))),
            FeatureConfig("few", TableConfig("few", 4, initializer=START, eviction=LRU(max_rows=2))),
        ],
        optimizer=SGD(1.0),
    )
    rare, few = layer.tables
    for step in range(3):
        lookup = layer.lookup({"rare": tf.constant([1, 10 + step]), "few": tf.range(5) + 5 * step})
        layer.apply_gradients(lookup, [tf.ones_like(rows) for rows in lookup.rows])
    assert rare.export().keys.numpy().tolist() == [1]  # the others came once
    assert int(rare.statistics().rejects) == 4
    few.evict()
    assert int(few.size()) <= 2


def test_each_feature_has_the_precision_that_it_asks_for():
    layer = EmbeddingCollection(
        [
            FeatureConfig("mixed", TableConfig("mixed", 4, initializer=START, precision=TwoPrecisions(2))),
            FeatureConfig("full", TableConfig("full", 4, initializer=START)),
            FeatureConfig("too", TableConfig("too", 4, initializer=START, precision=TwoPrecisions(2))),
        ],
        optimizer=SGD(0.1),
    )
    mixed, full = layer.tables
    for ids in ([1, 2, 3], [3]):
        lookup = layer.lookup(dict.fromkeys(("mixed", "full", "too"), tf.constant(ids)))
        layer.apply_gradients(lookup, [tf.ones_like(rows) for rows in lookup.rows])
    assert [int(table.statistics().half_rows) for table in (mixed, full)] == [4, 0]
    for name, id_, fits in (("mixed", 1, True), ("mixed", 3, False), ("too", 2, True), ("full", 1, False)):
        stored = row(layer, name, id_)
        assert np.array_equal(stored, stored.astype(np.float16)) == fits


def test_plan_prints_what_was_merged():
    layer = EmbeddingCollection(
        [
            FeatureConfig("item", dim=4),
            FeatureConfig("history", TableConfig("item", 4), combiner="sum"),
            FeatureConfig("wide", TableConfig("wide", 8, initializer=START, admission=CountAdmission(3))),
            FeatureConfig("half", TableConfig("half", 8, precision=TwoPrecisions(5))),
        ],
        optimizer=SGD(0.25),
        name="e",
    )
    texts = []
    layer.plan(print_fn=texts.append)
    (text,) = texts
    heading, narrow, wide, half = text.splitlines()
    assert heading.split()[:3] == ["table", "features", "dim"]
    assert re.split(r"  +", narrow)[:4] == ["e/item", "item, history (sum) -> item", "4", "2^62"]
    assert re.split(r"  +", wide)[0:3:2] == ["e/wide", "8"]
    assert "Normal(mean=0.0, stddev=1.0)" in wide
    policies = ["CountAdmission(threshold=3, filter=None)", "none", "float32", "SGD at 0.25"]
    assert re.split(r"  +", wide)[-4:] == policies
    assert re.split(r"  +", heading)[-2:] == ["precision", "optimizer"]
    precision = "TwoPrecisions(threshold=5, half_life=None, rounding='stochastic')"
    assert re.split(r"  +", half)[-2:] == [precision, "SGD at 0.25"]


def test_plan_goes_to_the_terminal(capsys):
    EmbeddingCollection([FeatureConfig("item", dim=4)]).plan()
    assert "Adam at the Keras optimizer's rate" in capsys.readouterr().out


def test_an_id_has_a_row_if_each_of_its_tables_has_one():
    features = [
        FeatureConfig("item", table=("item", "wide"), dim=(4, 8)),
        FeatureConfig("wide", dim=8),
        FeatureConfig("tag", dim=4, hash=True, combiner="mean"),
    ]
    layer = EmbeddingCollection(features)
    layer.lookup({"item": [3], "wide": [5], "tag": tf.ragged.constant([["red"]])})
    found = {
        "item": layer.has_rows("item", [3, 5, 4]),
        "wide": layer.has_rows("wide", [3, 5, 4]),
        "tag": layer.has_rows("tag", tf.ragged.constant([["red", "blue"], [], ["red"]])),
    }
    assert found["item"].numpy().tolist() == [True, False, False]
    assert found["wide"].numpy().tolist() == [True, True, False]
    assert found["tag"].to_list() == [[True, False], [], [True]]
    assert int(layer.tables[0].size()) + int(layer.tables[1].size()) == 4
    with pytest.raises(ConfigError, match="has no feature 'color': it has item, wide, tag"):
        layer.has_rows("color", [1])
