"""An index finds what scoring all items finds, with the same filters, and says when it is stale."""

import functools
import sys

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig
from gmeta.models import NextItemModel, TwoTower
from gmeta.models.sequence import nearest_items
from gmeta.models.sequence.catalogue import top_items
from gmeta.models.sequence.nearest_items import NearestItems

faiss = pytest.importorskip("faiss")
faiss.omp_set_num_threads(1)  # small searches, beside other tests


def ragged(rows):
    values = np.concatenate([np.zeros(0, np.int64), *rows])
    return tf.RaggedTensor.from_row_lengths(values, tf.constant([len(each) for each in rows], tf.int64))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([1, 2, 9, 60]),
    users=st.integers(0, 4),
    share=st.sampled_from([None, 0.0, 0.1, 0.6]),
    bias=st.sampled_from([0, -3, 2]),
    data=st.data(),
)
def test_it_finds_k_wherever_k_remain(seed, size, users, share, bias, data):
    """Of whole numbers, whose products have ties and no rounding; all lists are read in the end."""
    random = np.random.default_rng(seed)
    k, lists = data.draw(st.integers(1, size)), data.draw(st.integers(1, min(size, 5)))
    probes = data.draw(st.integers(1, lists))
    vectors, queries = random.integers(-2, 3, (size, 3)), random.integers(-2, 3, (users, 3))
    index = NearestItems(vectors, lists=lists, probes=probes)
    hidden, raised = (
        [random.integers(-1, size, random.integers(0, size + 2)) for _ in range(users)] for _ in range(2)
    )
    allow = None if share is None else tf.constant(random.random(size) < share)
    filters = {"leave_out": ragged(hidden), "allow": allow, "again": ragged(raised), "bias": float(bias)}
    numbers, scores = (each.numpy() for each in index.top_items(queries, k, **filters))
    floats = (tf.constant(each, tf.float32) for each in (queries, vectors))
    expected = [each.numpy() for each in top_items(*floats, k, **filters)]
    assert ((numbers < 0) == (expected[0] < 0)).all()
    products = queries @ vectors.T
    for row, found, score, own, more in zip(products, numbers, scores, hidden, raised, strict=True):
        row = row.astype(float)
        row[list(set(more[more >= 0]))] += bias
        some = found[found >= 0]
        assert len(set(some)) == len(some)
        assert not set(some) & set(own)
        assert allow is None or allow.numpy()[some].all()
        assert row[some].tolist() == score[: len(some)].tolist()
    index.probes = lists
    numbers, scores = (each.numpy() for each in index.top_items(queries, k, **filters))
    np.testing.assert_array_equal(scores, expected[1])
    np.testing.assert_array_equal(numbers, expected[0])


def clustered(size, seed=0):
    random = np.random.default_rng(seed)
    centres = random.normal(size=(size // 50, 16))
    return (centres[random.integers(0, len(centres), size)] + 0.3 * random.normal(size=(size, 16))).astype(
        np.float32
    )


@pytest.mark.parametrize("few", [2048, 16])
def test_recall_rises_with_probes_and_is_what_a_sort_says(few, monkeypatch):
    """Also where vectors are compared with the centres of some lists alone when lists are made."""
    monkeypatch.setattr(nearest_items, "_FEW_LISTS", few)
    vectors = clustered(4000)
    queries = vectors[::40] + 0.1
    index = NearestItems(vectors, lists=64)
    best = np.argsort(-queries @ vectors.T, axis=1)[:, :20]
    found = []
    for probes in (1, 8, 64):
        index.probes = probes
        numbers, scores = index.search(queries, 20)
        np.testing.assert_allclose(
            scores, np.take_along_axis(queries @ vectors.T, numbers, axis=1), rtol=1e-4, atol=1e-5
        )
        share = np.mean([len(set(a) & set(b)) / 20 for a, b in zip(numbers, best, strict=True)])
        found.append(index.recall(queries, 20))
        assert found[-1] == pytest.approx(share, abs=1e-3)
    assert found[0] < found[1] <= found[2]
    assert found[1] > 0.9
    assert found[2] == 1
    allow = np.arange(4000) % 50 == 0
    assert index.recall(queries, 20, allow=allow) == 1
    for filters in ({}, {"allow": allow}):
        exact, found = (search(queries, 20, **filters) for search in (index.exact, index.search))
        np.testing.assert_array_equal(exact[0], found[0])
        np.testing.assert_allclose(exact[1], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ids", ["numbers", "hashes", "texts"])
def test_a_folder_holds_it_whole(ids, tmp_path):
    vectors = clustered(500)
    items = {
        "numbers": None,
        "hashes": np.arange(500) * 10**15 - 7,
        "texts": [f"sku/{number}" for number in range(500)],
    }[ids]
    index = NearestItems(vectors, items, lists=8, probes=3, bias=0.5, scale=2.0)
    for _ in range(2):  # a former one is replaced
        index.save(tmp_path / "index")
    again = NearestItems.load(tmp_path / "index")
    assert (again.size, again.lists, again.probes) == (500, 8, 3)
    assert again.fingerprint == index.fingerprint
    some = index.catalogue.ids(tf.constant([[7, 8], [9, 499]])).numpy()
    filters = {"leave_out": some, "history": some[:, ::-1], "allow": np.arange(500) % 3 > 0}
    for number in range(2):  # ids, and scores
        own, other = (each.search(vectors[:2], 9, **filters)[number] for each in (index, again))
        np.testing.assert_array_equal(own, other)
    kept = (tmp_path / "index" / "vectors.npy").read_bytes()
    (tmp_path / "index" / "vectors.npy").write_bytes(kept[:-1] + b"\0")
    with pytest.raises(DataError, match=r"its files don't belong together\); build it again"):
        NearestItems.load(tmp_path / "index")
    (tmp_path / "index" / "index.faiss").write_bytes(b"no index")
    with pytest.raises(DataError, match="no readable index"):
        NearestItems.load(tmp_path / "index")
    with pytest.raises(DataError, match="no readable index"):
        NearestItems.load(tmp_path / "nowhere")


def test_a_damaged_bit_of_any_file_is_found(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(100, 4))
    NearestItems(vectors, [f"sku/{number}" for number in range(100)], scale=0.5).save(tmp_path / "index")
    for file in sorted((tmp_path / "index").iterdir()):
        whole = file.read_bytes()
        for place in (0, len(whole) // 3, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            with pytest.raises(DataError, match="no readable index"):
                NearestItems.load(tmp_path / "index")
        file.write_bytes(whole)
    assert NearestItems.load(tmp_path / "index").size == 100


def test_only_an_index_is_replaced(tmp_path):
    index = NearestItems(np.eye(4))
    (tmp_path / "mine").mkdir()
    index.save(tmp_path / "mine")  # an empty folder
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("kept")
    for taken in (tmp_path / "other", tmp_path / "other" / "notes.txt"):
        with pytest.raises(GmetaError, match="exists already and isn't an index"):
            index.save(taken)
    assert (tmp_path / "other" / "notes.txt").read_text() == "kept"


@functools.cache
def next_item():
    collection = EmbeddingCollection([FeatureConfig("item", dim=8, hash=True)])
    hstu = HSTU(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=4, bias_by_time=False)
    model = NextItemModel(collection, hstu, items=[f"sku/{n}" for n in range(200)], max_length=4)
    model.repeat.assign(0.05)
    return model


def two_tower():
    features = [FeatureConfig(name, dim=8) for name in ("history", "item")]
    collection = EmbeddingCollection([*features, FeatureConfig("bias", dim=1)])
    return TwoTower(collection, items=200, history="history", bias="bias", temperature=0.5)


@pytest.mark.parametrize("make", [next_item, two_tower])
def test_a_model_recommends_by_it(make):
    model, text = make(), make is next_item
    index = NearestItems.of(model, lists=6, probes=6)
    rows = [[3, 9, 3], [150], [], [1000, 5]]
    names = [[f"sku/{n}" for n in row] for row in rows] if text else rows
    batch = {"item": tf.ragged.constant(names, tf.string if text else tf.int64)}
    allow, leave_out = np.arange(200) % 5 > 0, batch["item"][::-1]
    for filters in ({}, {"leave_out_seen": True}, {"allow": allow, "leave_out": leave_out}):
        expected = model.recommend(batch, 12, **filters)
        found = model.recommend(batch, 12, nearest=index, **filters)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)
    seen = {"history": batch["item"]} if text else {"leave_out": batch["item"]}
    found = index.search(model.predict(batch, verbose=0), 12, **seen)
    expected = model.recommend(batch, 12)
    known = [0, 1, 3]  # the other one is answered by popularity, of which an index knows nothing
    np.testing.assert_array_equal(found[0][known], expected[0].numpy()[known])
    np.testing.assert_allclose(found[1][known], expected[1].numpy()[known], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="leave out vectors="):
        model.recommend(batch, nearest=index, vectors=model.item_vectors())
    with pytest.raises(ConfigError, match="leave out a graph"):
        tf.function(lambda: model.recommend(batch, nearest=index), autograph=False)()
    with pytest.raises(ConfigError, match="the index has 50 items, not 200"):
        model.recommend(batch, nearest=NearestItems(clustered(50)[:, :8]))


def test_a_stale_index_is_refused(tmp_path):
    model = two_tower()
    NearestItems.of(model).save(tmp_path / "index")
    assert NearestItems.load(tmp_path / "index", model=model).scale == 2
    model.compile("sgd")
    batch = {"item": tf.ragged.constant([[3, 9, 8]], tf.int64)}
    model.fit(tf.data.Dataset.from_tensors(batch), verbose=0)
    with pytest.raises(ConfigError, match=r"the vector of item \d+ has changed: the index is stale"):
        NearestItems.load(tmp_path / "index", model=model)
    with pytest.raises(ConfigError, match="its items are others than those of the index"):
        NearestItems.load(tmp_path / "index", model=next_item())


def with_vectors(model, vectors):
    """Give a model other vectors, as a delta does."""
    model.item_vectors = lambda numbers=None: tf.constant(vectors if numbers is None else vectors[numbers])


@pytest.mark.parametrize("mapped", [False, True], ids=["in memory", "from a file"])
def test_an_index_follows_its_model_and_is_then_what_a_new_one_is(mapped, tmp_path, monkeypatch):
    monkeypatch.setattr(nearest_items, "_ROWS", 64)  # several parts
    model = two_tower()
    vectors, queries = model.item_vectors().numpy(), clustered(60)[:, :9]
    given = vectors.copy()
    index = NearestItems.of(model, lists=6, probes=6)
    index.save(tmp_path / "index")
    if mapped:
        index = NearestItems.load(tmp_path / "index", model=model)
    assert (index.follow(model), index.fingerprint) == (0, NearestItems.of(model, lists=6).fingerprint)
    for changed in ([5, 80, 199], range(200)):  # the second time those of the first time too
        vectors = vectors.copy()
        vectors[changed] = vectors[changed][:, ::-1]
        with_vectors(model, vectors)
        model.temperature /= 2
        with pytest.raises(
            ConfigError, match=r"item 5 .* changed.*index\.follow\(model\) updates it|item 0 "
        ):
            index.check(model)
        assert index.follow(model) == len(changed)
        index.check(model)
        new = NearestItems.of(model, lists=6, probes=6)
        assert (index.fingerprint, index.scale) == (new.fingerprint, new.scale)
        for k in (1, 12, 200):
            for one, other in zip(index.search(queries, k), new.search(queries, k), strict=True):
                np.testing.assert_array_equal(one, other)
        index.save(tmp_path / "again")
        found = NearestItems.load(tmp_path / "again", model=model).search(queries, 9)
        np.testing.assert_array_equal(found[0], new.search(queries, 9)[0])
    np.testing.assert_array_equal(NearestItems.load(tmp_path / "index")._vectors, given)  # as it was


def test_an_index_follows_no_other_items_and_no_nan():
    model = two_tower()
    index, vectors = NearestItems.of(model, lists=6), model.item_vectors().numpy()
    with pytest.raises(ConfigError, match=r"its items are others than those of the index: .* build it again"):
        index.follow(next_item())
    vectors[7, 2] = np.nan
    with_vectors(model, vectors)
    with pytest.raises(ConfigError, match="the vector of item 7 isn't finite"):
        index.follow(model)
    assert np.isfinite(index.search(clustered(60)[:, :9], 200)[1]).all()  # as before


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda: NearestItems(np.zeros(4)), r"vectors must be \(items, d\), got the shape \(4,\)"),
        (lambda: NearestItems([[1.0], [np.nan]]), "squared length of item 1's vector isn't finite"),
        (lambda: NearestItems(np.eye(4), items=5), "4 vectors for 5 items"),
        (lambda: NearestItems(np.eye(4), lists=5), "lists must be at most 4"),
        (lambda: NearestItems(np.eye(4), lists=2, probes=3), "probes must be at most 2"),
        (
            lambda: NearestItems(np.eye(4)).search(np.eye(3)),
            r"queries must be \(n, 4\), got the shape \(3, 3\)",
        ),
        (lambda: NearestItems(np.eye(4)).search(np.full((1, 4), np.inf), 2), "queries must be finite"),
        (lambda: NearestItems(np.eye(4)).search(np.eye(4), 5), "k must be at most 4"),
        (lambda: NearestItems(np.eye(4)).search(np.eye(4), 2, allow=[True]), r"allow must be bool \(4,\)"),
        (lambda: NearestItems(np.eye(4)).search(np.eye(4), 2, leave_out=[[1]]), "users=4, rows=1"),
        (lambda: NearestItems(np.eye(4)).recall(np.zeros((0, 4)), 2), "recall needs queries"),
    ],
)
def test_what_makes_no_sense_is_refused(run, told):
    with pytest.raises(ConfigError, match=told):
        run()


def test_faiss_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ConfigError, match=r"NearestItems needs faiss .*: pip install 'gmeta\[nearest\]'"):
        NearestItems(np.eye(4))
