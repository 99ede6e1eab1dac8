"""A feature of several tables: its vectors are those of a feature for each table, fed the same ids."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.embedding.merge_plan import merge_tables
from gmeta.optimizers import SGD
from support.tables import assert_same_tables

START = Normal(0.0, 1.0)
NAMES = ("item", "by_city")


def tables(*dims):
    return tuple(TableConfig(name, dim, initializer=START) for name, dim in zip(NAMES, dims, strict=True))


def collections(of, join=None, **settings):
    """Return a collection with a feature of several tables, and one with a feature for each of them."""
    seen = FeatureConfig("seen", of[0], combiner="mean", hash=settings.get("hash", False))
    several = FeatureConfig("item", of, join=join, **settings)
    alone = [FeatureConfig(table.name, table, **settings) for table in of]
    return (
        EmbeddingCollection([seen, several], optimizer=SGD(0.5)),
        EmbeddingCollection([seen, *alone], optimizer=SGD(0.5)),
    )


def inputs(ids, seen):
    return {"item": ids, "seen": seen}, {**dict.fromkeys(NAMES, ids), "seen": seen}


def shaped(kind, lists):
    ragged = tf.ragged.constant(lists, dtype=tf.int64, ragged_rank=1)
    forms = {
        "one": lambda: tf.constant([sum(each) for each in lists], tf.int64),
        "matrix": lambda: tf.abs(ragged.to_tensor(3, shape=[len(lists), 3])),
        "padded": lambda: ragged.to_tensor(-1, shape=[len(lists), 4]),
        "sparse": ragged.to_sparse,
    }
    return forms.get(kind, lambda: ragged)()


def values(vectors):
    return vectors.to_list() if isinstance(vectors, tf.RaggedTensor) else vectors.numpy().tolist()


@given(
    lists=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=5),
    kind=st.sampled_from(["one", "matrix", "ragged", "padded", "sparse", "lists"]),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    dims=st.sampled_from([(3, 5), (4, 4)]),
    adds=st.booleans(),
    max_length=st.sampled_from([None, 2]),
)
def test_vectors_are_those_of_a_feature_for_each_table(lists, kind, combiner, dims, adds, max_length):
    settings = {"combiner": combiner if kind in ("padded", "sparse", "lists") else None}
    settings |= {"max_length": max_length} if kind != "one" else {}
    join = "sum" if adds and len(set(dims)) == 1 else "concat"
    several, alone = collections(tables(*dims), join, **settings)
    ours, theirs = inputs(shaped(kind, lists), tf.ragged.constant([[1, 2]] * len(lists), dtype=tf.int64))
    found, expected = several(ours), alone(theirs)
    one, other = expected["item"], expected["by_city"]
    if isinstance(one, tf.RaggedTensor):
        flat = [one.flat_values, other.flat_values]
        wanted = one.with_flat_values(tf.add_n(flat) if join == "sum" else tf.concat(flat, -1))
    else:
        wanted = one + other if join == "sum" else tf.concat([one, other], -1)
    assert values(found["item"]) == values(wanted)
    assert found["item"].shape[-1] == several.features[1].width == (4 if join == "sum" else sum(dims))
    if wanted.shape.rank == 2:
        side_by_side = several.concat(several.lookup(ours))
        np.testing.assert_array_equal(side_by_side, tf.concat([found["seen"], found["item"]], -1))


@pytest.mark.parametrize(("dims", "join"), [((4, 4), "concat"), ((4, 4), "sum"), ((3, 5), "concat")], ids=str)
def test_vectors_side_by_side_and_their_gradients(dims, join):
    item = FeatureConfig("item", tables(*dims), join=join)
    users = FeatureConfig("user", TableConfig("user", dims[0], initializer=START))
    layer = EmbeddingCollection([users, item], optimizer=SGD(1.0))
    ids = {"user": [7, 8, 7], "item": [3, 4, 3]}
    lookup = layer.lookup(ids)
    before = layer.embed(lookup)
    with tf.GradientTape() as tape:
        tape.watch(lookup.rows)
        together = layer.concat(lookup)
        loss = tf.reduce_sum(together)
    np.testing.assert_array_equal(together, tf.concat([before["user"], before["item"]], axis=1))
    layer.apply_gradients(lookup, tape.gradient(loss, lookup.rows))
    slope = 2.0 if join == "sum" else 1.0  # both rows that are added move
    after = layer(ids)["item"]
    np.testing.assert_allclose(after, before["item"] - slope * np.array([[2.0], [1.0], [2.0]]), rtol=1e-5)


def test_a_text_is_hashed_once():
    layer = EmbeddingCollection([FeatureConfig("item", ("a", "b"), dim=(4, 6), hash=True)])
    traced = tf.function(layer.lookup).get_concrete_function({"item": tf.TensorSpec([5], tf.string)})
    hashed = [op.inputs[0].shape for op in traced.graph.get_operations() if op.type == "GmetaHashText"]
    assert hashed == [[5]]


def test_texts_read_the_rows_that_a_feature_for_each_table_reads():
    several, alone = collections(tables(4, 6), hash=True)
    texts = tf.constant(["a", "b", "a"])
    ours, theirs = inputs(texts, tf.ragged.constant([["a"], [], ["c"]], dtype=tf.string))
    several.lookup(ours)
    alone.lookup(theirs)
    for one, other in zip(several.tables, alone.tables, strict=True):
        assert_same_tables(one, other)


def test_tables_of_one_width_are_looked_up_in_one_pass():
    several, _ = collections(tables(4, 4))
    lookup = several.lookup({"item": [1, 1, 2], "seen": tf.ragged.constant([[1]] * 3)})
    (rows,) = lookup.rows
    assert rows.shape[0] == 4  # ids 1 and 2 in each table; the list shares row 1


def test_rows_are_shared_with_features_that_name_a_table():
    seen = FeatureConfig("seen", "item", dim=4)
    layer = EmbeddingCollection([FeatureConfig("item", ("item", "by_city"), dim=(4, 8)), seen])
    vectors = layer({"item": [5, 6], "seen": [5, 6]})
    np.testing.assert_array_equal(vectors["item"][:, :4], vectors["seen"])


def test_the_rows_of_a_feature_for_each_table_are_read(tmp_path):
    several, alone = collections(tables(4, 6))
    ours, theirs = inputs(tf.constant([1, 2, 3]), tf.ragged.constant([[1], [2], [4]]))
    lookup = alone.lookup(theirs)
    alone.apply_gradients(lookup, [tf.ones_like(rows) for rows in lookup.rows])
    saved = tf.train.Checkpoint(layer=alone).save(str(tmp_path / "saved"))
    tf.train.Checkpoint(layer=several).restore(saved).assert_consumed()
    for one, other in zip(several.tables, alone.tables, strict=True):
        assert_same_tables(one, other)
    assert [table.name for table in several.tables] == [table.name for table in alone.tables]
    expected = alone(theirs)
    wanted = tf.concat([expected["item"], expected["by_city"]], axis=1)
    np.testing.assert_array_equal(several(ours)["item"], wanted)


@pytest.mark.parametrize("join", ["concat", "sum"])
def test_a_config_gives_the_feature_back(join):
    layer, _ = collections(tables(4, 4), join, combiner="sqrtn", max_length=3)
    again = EmbeddingCollection.from_config(json.loads(json.dumps(layer.get_config())))
    assert again.features == layer.features
    assert again.features[1].join == join


def test_names_stand_for_tables_of_the_given_widths():
    feature = FeatureConfig("item", table=["a", TableConfig("b", 16), "c"], dim=(8, 16, 4))
    assert feature.tables == (TableConfig("a", 8), TableConfig("b", 16), TableConfig("c", 4))
    assert (feature.dim, feature.join, feature.width) == ((8, 16, 4), "concat", 28)
    assert FeatureConfig("item", ("a", "b"), dim=8, join="sum").width == 8
    assert FeatureConfig("item", "a", dim=8) == FeatureConfig("item", TableConfig("a", 8))
    assert FeatureConfig("item", ("a",), dim=8).width == 8


def test_the_plan_shows_the_tables():
    layer, _ = collections(tables(4, 6), combiner="sum")
    texts = []
    layer.plan(print_fn=texts.append)
    _, first, second = texts[0].splitlines()
    assert re.split(r"  +", first)[1] == "seen (mean) -> item, item/item (sum)"
    assert re.split(r"  +", second)[1] == "item/by_city (sum)"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"table": ()}, r"feature 'x': table=\(\) has no tables"),
        ({"table": ("a", "b"), "dim": (4, 4, 4)}, r"reads 2 tables, but dim=\(4, 4, 4\) has 3 widths"),
        ({"table": ("a", "b"), "dim": (4,)}, r"reads 2 tables, but dim=\(4,\) has 1 widths"),
        ({"table": ("a", "b")}, "'x': nothing gives the width of the table 'a': give dim=16, or table="),
        ({"table": ("a", TableConfig("a", 4)), "dim": 4}, "'x' names the table a twice"),
        ({"table": ("a", "b"), "dim": (4, 8), "join": "sum"}, "join='sum' adds .* a, b are 4, 8 wide"),
        ({"table": ("a", "b"), "dim": 4, "join": "mean"}, "join must be 'concat' or 'sum', got 'mean'"),
        ({"table": ("a", "b"), "dim": 4, "combiner": "concat"}, "got 'concat'; join='concat' or"),
        ({"table": ("a", 5), "dim": 4}, r"must be a gmeta.layers.TableConfig, a name, .* got 5"),
        ({"table": ("a", TableConfig("b", 8)), "dim": 4}, "dim=4, but its table 'b' is 8 wide"),
        ({"table": "a", "dim": 4, "join": "sum"}, "join='sum' is for several tables, and .* reads one"),
        ({"dim": (4, 4)}, r"table 'x': dim must be a whole number from 1 to 1048576, got \(4, 4\)"),
    ],
)
def test_tables_that_make_no_sense_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        FeatureConfig("x", **wrong)


def test_tables_and_names_that_collide_are_refused():
    item = FeatureConfig("item", ("a", "b"), dim=4)
    with pytest.raises(ConfigError, match="features named twice: item/b"):
        merge_tables([item, FeatureConfig("item/b", dim=4)])
    with pytest.raises(ConfigError, match="'y' shares table 'b' but asks for"):
        merge_tables([item, FeatureConfig("y", "b", dim=8)])
    with pytest.raises(ConfigError, match="'y' shares table 'b' with hash=True"):
        merge_tables([item, FeatureConfig("y", "b", dim=4, hash=True)])


def test_a_combiner_for_single_ids_is_told_from_a_join():
    layer = EmbeddingCollection([FeatureConfig("item", ("a", "b"), dim=4, combiner="sum")])
    with pytest.raises(ConfigError, match=r"combiner='sum' .* shape \(2,\); .*join puts the tables' vectors"):
        layer({"item": [1, 2]})


def test_an_id_out_of_range_names_feature_and_table():
    layer = EmbeddingCollection([FeatureConfig("item", ("a", "b"), dim=4)])
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature 'item/a': id -1 at position 1 of 2"):
        layer({"item": [1, -1]})
