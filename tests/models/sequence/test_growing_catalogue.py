"""Catalogues that grow and shrink beside trained weights, and what a history without items is answered."""

import itertools
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from gmeta.checkpoint import ShardedCheckpoint
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.semantic_ids import SemanticIds
from gmeta.export import export_model
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig
from gmeta.models import FlatRetriever, GenerativeRetriever, NextItemModel
from gmeta.models.sequence.catalogue import Catalogue
from gmeta.optimizers import Adam
from gmeta.preprocess import semantic_ids
from support.cells import slow_but
from support.process_ranks import run_ranks

ITEMS = np.arange(20) * 1000 + 7
MORE = np.array([5, 6])


def codes(seed=0):
    vectors = np.random.default_rng(seed).normal(size=(len(ITEMS), 3))
    return semantic_ids(vectors, levels=2, codes=4, items=ITEMS)


def grown_codes():
    """The codes of the items and of two more, which share no code with others that many items have."""
    ids = codes()
    _, first = np.unique(ids.digits[:, :-1], axis=0, return_index=True)
    lone = [n for n in first if (ids.digits[:, :-1] == ids.digits[n, :-1]).all(axis=1).sum() == 1][:2]
    digits = ids.digits[lone] + [0, 0, 1]
    every = np.concatenate([ids.digits, digits]).astype(np.int32)
    return SemanticIds(np.concatenate([ITEMS, MORE]), every, ids.codebooks, ids.method)


def make(kind, items=ITEMS, ids=None):
    collection = EmbeddingCollection([FeatureConfig("item", dim=4, hash=True)], optimizer=Adam(0.01), seed=3)
    backbone = HSTU(
        blocks=1, heads=1, attention_dim=4, value_dim=4, max_length=40, bias_by_time=False, seed=1
    )
    settings = {"max_length": 6, "ks": (1,)}
    if kind == "next":
        model = NextItemModel(collection, backbone, items=items, negatives=8, **settings)
    elif kind == "generative":
        model = GenerativeRetriever(collection, backbone, ids or codes(), width=4, negatives=8, **settings)
    else:
        model = FlatRetriever(backbone, ids or codes(), dim=4, hash=True, **settings)
    model.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=True)  # graphs take longer than a few steps
    return model


def histories(users=12):
    """Some items occur much more often than others."""
    random = np.random.default_rng(1)
    rows = [[int(ITEMS[n]) for n in random.geometric(0.3, 5) % len(ITEMS)] for _ in range(users)]
    return {"item": tf.ragged.constant(rows, tf.int64)}


def best(model, x, k=5, **options):
    found = model.recommend if type(model) is NextItemModel else model.retrieve
    return [each.numpy().tolist() for each in found(x, k, **options)]


NOBODY = {"item": tf.ragged.constant([[], [4242]], tf.int64, ragged_rank=1)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Kind -> a trained model, and the folder with what every door has saved of it."""
    found = {}
    for kind in ("next", "generative", "flat"):
        model, folder = make(kind), tmp_path_factory.mktemp(kind)
        data = tf.data.Dataset.from_tensors(histories())
        ShardedCheckpoint(folder / "sharded").fit(model, data, epochs=2, verbose=0)
        model.save_weights(folder / "tensorflow")
        model.save_weights(folder / "model.weights.h5")
        found[kind] = model, folder
    return found


def load(door, model, saved, folder):
    if door == "sharded":
        ShardedCheckpoint(folder / "sharded").restore(model)
    elif door == "tensorflow":
        model.load_weights(folder / "tensorflow").assert_existing_objects_matched()
    elif door == "keras":
        model.load_weights(folder / "model.weights.h5")
    else:
        model.set_weights(saved.get_weights())


DOORS = ("sharded", "tensorflow", "keras", "weights")


# Quick: each kind by one door, and each door.
JOIN = [("next", "sharded"), ("next", "keras"), ("generative", "weights"), ("flat", "tensorflow")]


@pytest.mark.parametrize(
    ("kind", "door"), slow_but(JOIN, itertools.product(["next", "generative", "flat"], DOORS))
)
def test_new_items_join_a_trained_model(trained, kind, door):
    saved, folder = trained[kind]
    model = make(kind, np.concatenate([ITEMS, MORE]), grown_codes())
    load(door, model, saved, folder)
    x = histories()
    np.testing.assert_array_equal(model.predict(x, verbose=0), saved.predict(x, verbose=0))
    assert best(model, NOBODY)[0] == best(saved, NOBODY)[0]
    if kind == "next":  # what is new starts as an item that was never seen
        fresh = make(kind, np.concatenate([ITEMS, MORE])).item_vectors()[-2:]
        np.testing.assert_array_equal(model.item_vectors()[-2:], fresh)
        np.testing.assert_array_equal(model.item_vectors()[:-2], saved.item_vectors())
    # It trains on, with the new items.
    more = {"item": tf.ragged.constant([[5, 6, 5, int(ITEMS[0])]] * 4, tf.int64)}
    assert np.isfinite(model.fit(tf.data.Dataset.from_tensors(more), verbose=0).history["loss"][0])
    assert model.catalogue.counts.numpy()[-2:].tolist() == [8, 4]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", ["next", "generative"])
def test_items_leave_a_trained_model_and_the_others_come_in_another_order(trained, kind, door):
    saved, folder = trained[kind]
    ids, kept = codes(), np.arange(12)[::-1]
    model = make(kind, ITEMS[kept], SemanticIds(ITEMS[kept], ids.digits[kept], ids.codebooks, ids.method))
    load(door, model, saved, folder)
    np.testing.assert_array_equal(model.item_vectors(), saved.item_vectors().numpy()[kept])
    np.testing.assert_array_equal(model.catalogue.counts, saved.catalogue.counts.numpy()[kept])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", ["generative", "flat"])
def test_weights_are_refused_by_a_model_that_codes_their_items_otherwise(trained, kind, door):
    saved, folder = trained[kind]
    ids = codes()
    digits = ids.digits[np.r_[1, 0, 2 : len(ITEMS)]]
    model = make(kind, ITEMS, SemanticIds(ITEMS, digits, ids.codebooks, ids.method))
    before = [weight.numpy() for weight in model.trainable_weights]
    with pytest.raises(
        ConfigError, match=r"other semantic ids: item 7 has another code there; make the model"
    ):
        load(door, model, saved, folder)
    if door == "weights":
        for weight, value in zip(model.trainable_weights, before, strict=True):
            np.testing.assert_array_equal(weight, value)
    strange = SemanticIds(ITEMS + 1, ids.digits, ids.codebooks, ids.method)
    with pytest.raises(ConfigError, match="other semantic ids: it knows none of these items"):
        load(door, make(kind, ITEMS + 1, strange), saved, folder)


def test_flat_codes_of_more_items_than_shared_codes_before_grow_by_a_partial_restore(trained):
    saved, folder = trained["flat"]
    ids, said = codes(), []
    many = np.unique(ids.digits[:, :-1], axis=0, return_counts=True)
    shared = many[0][np.argmax(many[1])]
    digits = np.concatenate([ids.digits, [[*shared, many[1].max()]]]).astype(np.int32)
    grown = SemanticIds(np.append(ITEMS, 5), digits, ids.codebooks, ids.method)
    with pytest.raises(DataError, match="load what fits with partial=True"):
        ShardedCheckpoint(folder / "sharded").restore(make("flat", None, grown))
    model, new = make("flat", None, grown), make("flat", None, grown)
    ShardedCheckpoint(folder / "sharded").restore(model, partial=True, print_fn=said.append)
    assert "the rows that it had are loaded" in said[0]
    np.testing.assert_array_equal(model.scorer.vectors[:-1], saved.scorer.vectors)
    np.testing.assert_array_equal(model.scorer.vectors[-1:], new.scorer.vectors[-1:])
    x = histories()
    np.testing.assert_allclose(model.predict(x, verbose=0), saved.predict(x, verbose=0), atol=1e-6)


@pytest.mark.parametrize("kind", ["next", "generative", "flat"])
def test_a_history_without_items_is_answered_by_popularity(trained, kind):
    model, _ = trained[kind]
    seen = Counter(histories()["item"].values.numpy().tolist())
    expected = sorted(
        ITEMS.tolist(), key=lambda item: -seen[item]
    )  # in equal cases, in the catalogue's order
    shares = np.log([(2 * seen[item] + 1) / (2 * sum(seen.values()) + len(ITEMS)) for item in expected])
    for options in ({}, {"leave_out_seen": True}):
        items, scores = best(model, NOBODY, 5, **options)
        assert items == [expected[:5]] * 2
        np.testing.assert_allclose(scores, [shares[:5]] * 2, rtol=1e-6)
    # Others are answered as ever.
    x = histories(3)
    mixed = {"item": tf.concat([NOBODY["item"], x["item"]], axis=0)}
    np.testing.assert_allclose(best(model, mixed)[1][2:], best(model, x)[1], rtol=1e-5)
    assert best(model, mixed)[0][2:] == best(model, x)[0]
    if kind != "next":
        allow = ~np.isin(ITEMS, expected[:2])
        items, scores = best(model, NOBODY, 5, allow=allow)
        assert items == [expected[2:7]] * 2
        np.testing.assert_allclose(
            np.exp(best(model, NOBODY, 18, allow=allow, beam=20)[1][0]).sum(), 1, rtol=1e-5
        )
        (few,) = best(model, {"item": NOBODY["item"][:1]}, 3, allow=np.isin(ITEMS, expected[:2]))[0]
        assert few == [*expected[:2], -1]


# Quick: flat, and for what comes next tests/export/test_export_sequences.py.
@pytest.mark.parametrize("kind", [pytest.param("next", marks=pytest.mark.slow), "flat"])
@pytest.mark.shown_by("models/generative/test_flat_retriever.py::test_an_exported_model_answers_as_here")
def test_an_export_of_a_grown_catalogue_answers_as_the_model(trained, kind, tmp_path):
    saved, folder = trained[kind]
    model = make(kind, np.concatenate([ITEMS, MORE]), grown_codes())
    load("sharded", model, saved, folder)
    export_model(model, tmp_path / "1", text_ids=False)
    signatures = tf.saved_model.load(str(tmp_path / "1")).signatures
    answer = signatures["recommend" if kind == "next" else "retrieve"]
    rows = [*NOBODY["item"].to_list(), [5, int(ITEMS[0])]]
    found = answer(item=tf.ragged.constant(rows, tf.int64).to_tensor(-1))
    items, scores = best(model, {"item": tf.ragged.constant(rows, tf.int64)})
    assert found["items"][:, :5].numpy().tolist() == items
    np.testing.assert_allclose(found["scores"][:, :5], scores, rtol=1e-4)
    assert items[0] == items[1] == best(saved, NOBODY)[0][0]
    assert found["unknown_history"].numpy().tolist() == [0, 1, 0]


def test_counts_are_of_what_training_reads_and_of_nothing_else(trained):
    model = make("next")
    long = {"item": tf.ragged.constant([[int(item) for item in ITEMS[:9]]], tf.int64)}
    model.evaluate(tf.data.Dataset.from_tensors(long), verbose=0)
    model.recommend(long)
    assert not model.catalogue.counts.numpy().any()
    model.fit(tf.data.Dataset.from_tensors(long), verbose=0)
    assert model.catalogue.counts.numpy().tolist() == [0] * 2 + [1] * 7 + [0] * 11  # the last max_length + 1


def test_a_model_of_before_loads_without_counts_and_refuses_other_codes(trained, tmp_path):
    """Earlier checkpoints hold the catalogue as a variable, or a digest of the ids, and no counts."""
    saved, _ = trained["generative"]
    digest = np.frombuffer(bytes.fromhex(saved.ids.digest), np.int64)
    parts = {name: getattr(saved, name) for name in ("collection", "backbone", "scorer", "places", "repeat")}
    earlier = tf.train.Checkpoint(
        **parts,
        norm_scale=saved.norm_scale,
        norm_offset=saved.norm_offset,
        catalogue=tf.train.Checkpoint(_keys=tf.Variable(ITEMS)),
        digest=tf.Variable(digest),
    )
    path = earlier.write(str(tmp_path / "earlier"))
    model = make("generative")
    tf.train.Checkpoint(model).read(path)
    x = histories()
    np.testing.assert_array_equal(model.predict(x, verbose=0), saved.predict(x, verbose=0))
    assert not model.catalogue.counts.numpy().any()
    with pytest.raises(
        ConfigError, match=r"other semantic ids.*load the weights into a model with the former ids"
    ):
        tf.train.Checkpoint(make("generative", None, grown_codes())).read(path)
    store, again = {}, make("generative")
    saved.save_own_variables(store)
    own = {name: value for name, value in store.items() if name.isdecimal()}
    again.load_own_variables({**own, str(len(own)): digest})
    np.testing.assert_array_equal(again.places, saved.places)
    with pytest.raises(ConfigError, match="other semantic ids"):
        again.load_own_variables({**own, str(len(own)): digest + 1})


def on_rank(make, histories, nobody, best, folder):
    from gmeta.checkpoint import ShardedCheckpoint
    from gmeta.core import collectives

    model, x = make("next"), histories()
    data = tf.data.Dataset.from_tensor_slices(x).batch(3)
    ShardedCheckpoint(folder).fit(model, data, epochs=1, verbose=0)
    again = make("next")
    ShardedCheckpoint(folder).restore(again)
    own = model.catalogue.counts.numpy().tolist()
    ShardedCheckpoint(folder).fit(again, data, epochs=2, verbose=0)
    return collectives.world().rank, own, again.catalogue.counts.numpy().tolist(), best(again, nobody)[0]


@pytest.mark.ranks
def test_ranks_count_together(tmp_path):
    seen = Counter(histories()["item"].values.numpy().tolist())
    counts = [seen[item] for item in ITEMS.tolist()]
    found = run_ranks(on_rank, 2, make, histories, NOBODY, best, str(tmp_path))
    for _, own, again, answered in found:
        assert own == counts
        assert again == [2 * count for count in counts]
        assert answered == found[0][3]


def test_trial_steps_leave_no_counts():
    from gmeta.training.rank_steps import make_variables
    from gmeta.training.token_limit import keep_state

    model, x = make("next"), histories()
    make_variables(model, x)
    with keep_state(model):
        model.train_on_batch(x)
        assert model.catalogue.counts.numpy().any()
    assert not model.catalogue.counts.numpy().any()


def test_the_most_popular_of_large_counts_are_told_apart():
    catalogue = Catalogue(4, "model", FeatureConfig("item", dim=4))
    catalogue.load(
        {"keys": np.arange(3), "counts": np.array([2**60, 2**60 + 1, 3]), "marks": np.zeros(0, int)}
    )
    numbers, scores = catalogue.most_popular(6)
    assert numbers.numpy().tolist() == [1, 0, 2, 3, -1, -1]
    assert np.isneginf(scores[4:]).all()
    np.testing.assert_allclose(tf.exp(scores[:2]), 0.5)
