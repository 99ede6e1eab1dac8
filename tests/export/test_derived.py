"""Deltas compute again what an export computes of a catalogue: answers are those of a later export."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta import initializers, optimizers
from gmeta.export import Publisher, export_model
from gmeta.export.delta_signatures import dense_weights
from gmeta.export.derived import Derived, derived_values
from gmeta.export.sequence_models import next_item_signatures, retrieval_signatures, two_tower_signatures
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.losses import SampledSoftmax
from gmeta.models import FlatRetriever, GenerativeRetriever, NextItemModel, TwoTower
from gmeta.ops import AttentionMask
from gmeta.ops.table.portable_tables import portable_ops
from gmeta.preprocess import semantic_ids
from support.serving import ask_all

ITEMS, TAGS = 200, 17
START = initializers.Constant(0.1)  # which take no graph to compute
HASHES = np.arange(-100, 100) * 10**16 + 3
RANDOM = np.random.default_rng(0)
OF_ITEMS = tf.ragged.constant([RANDOM.integers(0, TAGS, RANDOM.integers(0, 4)) for _ in range(ITEMS)])


def collection_of(*features):
    return EmbeddingCollection(features, optimizer=optimizers.SGD(0.5), seed=1)


def feature(name, dim=8, **config):
    return FeatureConfig(name, TableConfig(name, dim, initializer=START), **config)


class Plain(tf.keras.layers.Layer):
    """A backbone whose graph is quickly made: a layer of each token alone."""

    needs_times, mask = False, AttentionMask()

    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(8, "relu")

    def call(self, x, times=None, view=None, training=None):
        return x._replace(values=self.dense(x.values))


def two_tower(hidden):
    tags = FeatureConfig("tags", TableConfig("tags", 8, initializer=START), combiner="mean", hash=True)
    features = [feature(name, hash=True) for name in ("user", "item", "history")]
    bias = feature("bias", 1, hash=True)
    return TwoTower(
        collection_of(*features, tags, bias),
        items=HASHES,
        history="history",
        item_columns={"tags": OF_ITEMS},
        bias="bias",
        hidden=hidden,
    )


def make(kind):
    """A model, and its signatures, which answer with all items."""
    ids = semantic_ids(np.random.default_rng(0).normal(size=(ITEMS, 3)), levels=2, codes=4)
    if kind == "next item":
        loss = SampledSoftmax(temperature=0.1, normalize=True, in_batch=False)
        model = NextItemModel(collection_of(feature("item")), Plain(), items=ITEMS, max_length=6, loss=loss)
        return model, recommend(next_item_signatures(model, k=ITEMS))
    if kind in ("towers", "sums"):
        model = two_tower([16] if kind == "towers" else [])
        return model, recommend(two_tower_signatures(model, k=ITEMS, leave_out_seen=False))
    if kind == "flat":
        stack = HSTU(blocks=1, heads=1, attention_dim=4, value_dim=4, max_length=16, bias_by_time=False)
        model = FlatRetriever(stack, ids, dim=8, max_length=4, ks=(5,))
    else:
        model = GenerativeRetriever(
            collection_of(feature("item")), Plain(), ids, max_length=6, width=8, ks=(5,)
        )
    return model, retrieval_signatures(model, k=ITEMS, beam=ITEMS)


def recommend(signatures):
    return {"recommend": signatures["recommend"]}


def item_ids(model):
    return model.catalogue.ids(tf.range(ITEMS, dtype=tf.int64)).numpy()


def train(model, seed):
    """A step by gradients that a seed draws, of some items and users, counts of items, and rows removed."""
    random = np.random.default_rng(seed)
    some = random.choice(ITEMS, 20)
    model.catalogue.count(tf.constant(some))
    for weight in model.trainable_variables:
        weight.assign_add(random.normal(0, 0.3, weight.shape))
    if isinstance(model, FlatRetriever):
        return
    inputs = dict(model.item_inputs(tf.constant(some)))
    inputs |= {
        name: tf.constant(random.choice(item_ids(model), 9)) for name in ("user", "history") if name in inputs
    }
    lookup = model.collection.lookup(inputs)
    rates = [tf.constant(random.normal(size=rows.shape), tf.float32) for rows in lookup.rows]
    model.collection.apply_gradients(lookup, rates, 0.5)
    gone = model.item_inputs(tf.constant(some[:7]))
    for table, keys in zip(model.collection.tables, model.collection.keys_of(gone), strict=True):
        table.remove(keys)


def request(model, signatures):
    """Five histories, the first without a known item."""
    random = np.random.default_rng(9)
    drawn = random.choice(item_ids(model), (5, 4))
    drawn[0] = 12345
    sent = {"item": drawn, "user": random.choice(item_ids(model), 5)}
    return {name: sent[name] for name in next(iter(signatures.values())).inputs}


KINDS = [
    ("next item", "float32"),
    ("next item", "int8"),
    ("towers", "float32"),
    ("sums", "bfloat16"),
    ("generative", "float32"),
    ("flat", "float32"),
]


@pytest.mark.shown_by(case=["next item-int8", "towers-float32"])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_each_delta_makes_the_answers_of_an_export(kind, dtype, tmp_path):
    """With dense weights, of an export at its version; without, of one with the weights of the last ones."""
    model, signatures = make(kind)
    train(model, 0)
    export = {"signatures": signatures, "text_ids": False}
    publisher = Publisher(model, tmp_path / "online", dtype=dtype, export=export)
    base = publisher.publish().path
    sent, name = request(model, signatures), next(iter(signatures))
    former = {each: variable.numpy() for each, variable in dense_weights(model).items()}
    requests, wholes, removed = [(base, name, sent)], [], 0
    for seed, dense in ((1, False), (2, True)):
        train(model, seed)
        published = publisher.publish(dense=dense)
        if published is None:  # without dense weights, nothing changes in a flat retriever
            assert kind == "flat"
            continue
        removed += published.removed
        fresh = {each: variable.numpy() for each, variable in dense_weights(model).items()}
        for each, variable in dense_weights(model).items():
            variable.assign(fresh[each] if dense else former[each])
        wholes.append(export_model(model, tmp_path / f"{seed}", dtype=dtype, **export).folder)
        for each, variable in dense_weights(model).items():
            variable.assign(fresh[each])
        requests += [(base, "apply_delta", send(published.path)), (base, name, sent)]
    assert removed > 3 or kind == "flat"
    count = len(requests)
    found = ask_all([*requests, *((whole, name, sent) for whole in wholes)])
    for before, answer, right in zip(found[:count:2], found[2:count:2], found[count:], strict=False):
        for key, value in right.items():
            np.testing.assert_array_equal(answer[key], value, key)
        assert (answer["scores"] != before["scores"]).mean() > 0.5
    if model.answers_popular:
        np.testing.assert_array_equal(right["items"][0], model.catalogue.most_popular(ITEMS)[0])


def send(delta):
    return {"delta_bytes": np.array(delta.read_bytes(), object)}


@pytest.fixture(scope="module")
def towers():
    return {kind: two_tower([16] if kind == "towers" else []) for kind in ("towers", "sums")}


@pytest.mark.parametrize("kind", ["towers", "sums"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_what_a_change_of_rows_reaches_is_computed_again(towers, kind, data):
    """Of ids at random, of items, their columns or neither, that get a row or lose it."""
    model = towers[kind]
    derived = Derived(
        "vectors",
        model.item_vectors,
        items=ITEMS,
        collection=model.collection,
        inputs=None if kind == "towers" else model.item_inputs,
    )
    with portable_ops(live=True) as tables, derived_values() as values:
        before = derived()[0].numpy()
        value, changed = values[derived], []
        drawn = data.draw(st.lists(st.integers(0, ITEMS - 1), max_size=5))
        inputs = model.item_inputs(tf.constant(drawn, tf.int64))
        inputs["user"] = tf.constant(data.draw(st.lists(st.integers(0, 99), max_size=3)), tf.int64)
        for table, keys in zip(model.collection.tables, model.collection.keys_of(inputs), strict=True):
            copy = tables.freeze(table)
            some = tf.boolean_mask(
                keys,
                np.array(data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys))), bool),
            )
            copy.upsert(some, tf.random.stateless_normal([len(some), table.dim], [1, len(some)]))
            changed.append((copy, some))
        value.update(changed, {})
        after = tf.convert_to_tensor(value.variables[0]).numpy()
        again = Derived("again", model.item_vectors, items=ITEMS)()[0].numpy()
    np.testing.assert_array_equal(after, again)
    if not sum(len(keys) for _, keys in changed):
        np.testing.assert_array_equal(after, before)


def test_fit_publishes_a_model_whose_catalogue_is_exported(tmp_path):
    model, _ = make("next item")
    model.compile("adam")
    random = np.random.default_rng(0)
    batch = {"item": tf.ragged.constant(random.integers(0, ITEMS, (32, 6)))}
    data = tf.data.Dataset.from_tensors(batch).repeat(3)
    publisher = Publisher(model, tmp_path / "online", every="0", dense_every="0")
    model.fit(data, verbose=0, callbacks=[publisher])
    deltas = sorted((tmp_path / "online/deltas").glob("*.delta"))
    assert len(deltas) >= 2
    base, sent = tmp_path / "online/model/1", {"item": np.array([[3, 7, 5], [-1, -1, -1]])}
    export_model(model, tmp_path / "whole")
    requests = [(base, "apply_delta", send(each)) for each in deltas]
    requests += [(base, "recommend", sent), (tmp_path / "whole", "recommend", sent)]
    *_, answer, right = ask_all(requests)
    for key, value in right.items():
        np.testing.assert_array_equal(answer[key], value, key)
    items, scores = model.recommend({"item": tf.ragged.constant([[3, 7, 5], []], tf.int64)})
    np.testing.assert_array_equal(answer["items"], items)
    np.testing.assert_allclose(answer["scores"], scores, rtol=1e-5, atol=1e-5)
