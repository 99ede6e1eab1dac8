"""Deltas compute again what an export computes of a catalogue: answers are those of a later export."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta import initializers, optimizers
from gmeta.export import Publisher, export_model
from gmeta.export import derived as module
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
        return model, recommend(two_tower_signatures(model, k=ITEMS, text_ids=False))
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


@pytest.mark.shown_by(case="next item-int8")
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
        assert (answer["scores"] != before["scores"]).any()
    if model.answers_popular:
        np.testing.assert_array_equal(right["items"][0], model.catalogue.most_popular(ITEMS)[0])


def send(delta):
    return {"delta_bytes": np.array(delta.read_bytes(), object)}


@pytest.mark.parametrize("kind", ["towers", "sums"])
def test_what_a_change_of_rows_reaches_is_computed_again(kind, monkeypatch):
    """Of ids at random, of items, their columns or neither, that get a row or lose it; in four pieces."""
    monkeypatch.setattr(module, "_ITEMS_AT_A_TIME", 64)
    model = two_tower([16] if kind == "towers" else [])
    own = {"collection": model.collection, "inputs": model.item_inputs, "alone": kind == "sums"}
    derived = Derived("vectors", model.item_vectors, items=ITEMS, **own)
    always_all = Derived("all", model.item_vectors, items=ITEMS)
    with portable_ops(live=True) as tables, derived_values() as values:
        before = derived()[0].numpy()
        np.testing.assert_allclose(before, model.item_vectors(), rtol=1e-5, atol=1e-6)
        always_all()
        copies = [tables.freeze(table) for table in model.collection.tables]

        @settings(max_examples=25, deadline=None)
        @given(
            items=st.lists(st.integers(0, ITEMS - 1), max_size=5),
            users=st.lists(st.integers(0, 99), max_size=3),
            seed=st.integers(0, 10**6),
        )
        def change(items, users, seed):
            random, changed = np.random.default_rng(seed), []
            inputs = model.item_inputs(tf.constant(items, tf.int64))
            inputs["user"] = tf.constant(users, tf.int64)
            for copy, keys in zip(copies, model.collection.keys_of(inputs), strict=True):
                keys = tf.boolean_mask(keys, random.random(len(keys)) < 0.5)
                if random.random() < 0.3:
                    copy.remove(keys)
                else:
                    rows = random.normal(size=(len(keys), copy.format.dim))
                    copy.upsert(keys, tf.constant(rows, tf.float32))
                changed.append((copy, keys))
            for value in values.values():
                value.update(changed, {})
            np.testing.assert_array_equal(derived()[0], always_all()[0])

        change()
        assert (derived()[0].numpy() != before).mean() > 0.1


@pytest.mark.shown_by("test_each_delta_makes_the_answers_of_an_export")
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
