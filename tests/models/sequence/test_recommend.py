"""Recommendations keep to filters, and are k wherever k remain: compared with a sort in NumPy."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.export.saved_model import export_model
from gmeta.export.sequence_models import next_item_signatures, two_tower_signatures
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig
from gmeta.models import NextItemModel, TwoTower
from gmeta.preprocess.plan.column_values import hash_text

SIZE = 12
TEXTS = np.array([f"sku/{number}".encode() for number in range(SIZE)], object)
IDS = {
    "numbers": np.arange(SIZE),
    "hashes": np.array([hash_text(text.decode()) for text in TEXTS]),
    "texts": TEXTS,
}
COUNTS = np.array([3, 0, 3, 7, 1, 7, 7, 0, 2, 2, 5, 1])
STRANGERS = {"numbers": 99, "hashes": 7, "texts": b"sku/new"}


@functools.cache
def next_item(kind):
    collection = EmbeddingCollection([FeatureConfig("item", dim=8, hash=kind != "numbers")])
    hstu = HSTU(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=4, bias_by_time=False)
    model = NextItemModel(collection, hstu, items=SIZE if kind == "numbers" else IDS[kind], max_length=4)
    model.repeat.assign(0.05)
    return counted(model)


@functools.cache
def two_tower(kind):
    hashed = kind != "numbers"
    features = [FeatureConfig("history", dim=8, hash=hashed), FeatureConfig("item", dim=8, hash=hashed)]
    features += [FeatureConfig("bias", dim=1, hash=hashed)]
    settings = {"history": "history", "bias": "bias", "temperature": 0.5}
    return counted(
        TwoTower(EmbeddingCollection(features), items=SIZE if kind == "numbers" else IDS[kind], **settings)
    )


def counted(model):
    keys = model.catalogue.all_keys.numpy()
    model.catalogue.load({"keys": keys, "counts": COUNTS, "marks": np.zeros(0, int)})
    return model


def draw(random, kind, users, longest):
    """Lists of items' numbers, with repeats and strangers (-1), and their ids, ragged."""
    rows = [random.integers(-1, SIZE, random.integers(0, longest + 1)) for _ in range(users)]
    numbers = np.concatenate([np.zeros(0, np.int64), *rows])
    ids = np.where(numbers < 0, STRANGERS[kind], IDS[kind][numbers])
    ids = tf.constant(ids.tolist(), tf.string if kind == "texts" else tf.int64)
    return rows, tf.RaggedTensor.from_row_lengths(ids, tf.constant([len(row) for row in rows], tf.int64))


def scores_of(model, batch, had, leave_out_seen):
    """The scores of all items, (users, SIZE), without filters."""
    products = model(batch, training=False).numpy() @ model.item_vectors().numpy().T
    if isinstance(model, TwoTower):
        return products / 0.5
    for row, own in zip(products, had, strict=True):
        row[list(set(own[own >= 0]))] += 0 if leave_out_seen else float(model.scaled_bias)
        if (own < 0).all():
            row[:] = np.log((COUNTS + 1) / (COUNTS + 1).sum())
    return products


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    kind=st.sampled_from([*IDS]),
    make=st.sampled_from([next_item, two_tower]),
    k=st.integers(1, SIZE),
    share=st.sampled_from([None, 0.0, 0.2, 0.7]),
    blocked=st.sampled_from([None, 2, SIZE + 4]),
    padded=st.booleans(),
    seen=st.booleans(),
)
def test_filters_leave_the_best_of_what_remains(seed, kind, make, k, share, blocked, padded, seen):
    random, model, users = np.random.default_rng(seed), make(kind), 4
    had, histories = draw(random, kind, users, 4)
    batch = {"item": histories}
    allow = None if share is None else random.random(SIZE) < share
    left_out, leave_out = [np.zeros(0, np.int64)] * users, None
    if blocked is not None:
        left_out, leave_out = draw(random, kind, users, blocked)
        leave_out = leave_out.to_tensor(b"" if kind == "texts" else -1) if padded else leave_out
    items, scores = model.recommend(batch, k, leave_out_seen=seen, leave_out=leave_out, allow=allow)
    expected = scores_of(model, batch, had, seen)
    if allow is not None:
        expected -= np.log(max((COUNTS + 1)[allow].sum(), 1) / (COUNTS + 1).sum()) * answered(model, had)
        expected[:, ~allow] = -np.inf
    for row, own, others in zip(expected, had, left_out, strict=True):
        row[others[others >= 0]] = -np.inf
        if seen:
            row[own[own >= 0]] = -np.inf
    known = {item: number for number, item in enumerate(IDS[kind].tolist())}
    for row, found, score in zip(expected, items.numpy().tolist(), scores.numpy(), strict=True):
        remain = min(k, int(np.isfinite(row).sum()))
        numbers = [known[item] for item in found[:remain]]
        assert len(set(numbers)) == remain
        np.testing.assert_allclose(row[numbers], score[:remain], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.sort(row)[::-1][:remain], score[:remain], rtol=1e-4, atol=1e-5)
        assert found[remain:] == [b"" if kind == "texts" else -1] * (k - remain)
        assert np.isneginf(score[remain:]).all()


def answered(model, had):
    """Which users are answered by popularity, (users, 1)."""
    return np.array([[float(model.answers_popular and (own < 0).all())] for own in had])


def test_the_most_popular_that_remain_are_in_their_order():
    model = next_item("numbers")
    batch = {"item": tf.ragged.constant([[], [99]], tf.int64)}
    allow = np.arange(SIZE) != 6
    items, _ = model.recommend(batch, 4, leave_out=[[5, 5, 99, 10], [-1, -1, -1, -1]], allow=allow)
    assert items.numpy().tolist() == [[3, 0, 2, 8], [3, 5, 10, 0]]
    popular = model.catalogue.most_popular(SIZE, allow)
    again, _ = model.recommend(batch, 4, leave_out=[[5, 10], [-1, -1]], allow=allow, popular=popular)
    assert again.numpy().tolist() == items.numpy().tolist()
    with pytest.raises(ConfigError, match="popular= has 4 items; with leave_out= it must rank all 12"):
        model.recommend(batch, 4, leave_out=[[5], [1]], popular=model.catalogue.most_popular(4))


@pytest.mark.parametrize(
    ("filters", "told"),
    [
        ({"allow": np.ones(5, bool)}, r"allow must be bool \(12,\), got bool \(5,\)"),
        ({"allow": np.ones(SIZE)}, r"allow must be bool \(12,\), got float64"),
        ({"leave_out": [3, 4]}, r"leave_out must be ragged, one row per user, or a matrix"),
        ({"leave_out": [[3], [4]]}, "leave_out must have one row per user: users=1, rows=2"),
        ({"leave_out": [["sku/1"]]}, "item must be integers, got string"),
    ],
)
@pytest.mark.parametrize("make", [next_item, two_tower])
def test_filters_of_another_form_are_refused(make, filters, told):
    with pytest.raises(ConfigError, match=told):
        make("numbers").recommend({"item": tf.ragged.constant([[3]], tf.int64)}, **filters)


@pytest.mark.parametrize(
    ("make", "signatures", "kind"),
    [(next_item, next_item_signatures, "texts"), (two_tower, two_tower_signatures, "numbers")],
)
def test_an_export_takes_what_is_blocked_and_has_a_mask(make, signatures, kind, tmp_path):
    model, random = make(kind), np.random.default_rng(5)
    _, histories = draw(random, kind, 6, 4)
    _, leave_out = draw(random, kind, 6, 9)
    histories = tf.concat([histories[:-1], histories[:1, :0]], 0)  # the last one has none
    allow = np.arange(SIZE) % 4 > 0
    made = signatures(model, k=6, leave_out=True, allow=allow)
    assert set(made["recommend"].inputs) - set(made["query"].inputs) == {"leave_out"}
    exported = export_model(model, tmp_path / "1", signatures=made)
    served = tf.saved_model.load(str(exported.folder)).signatures["recommend"]
    padding = b"" if kind == "texts" else -1
    answer = served(item=histories.to_tensor(padding), leave_out=leave_out.to_tensor(padding))
    items, scores = model.recommend({"item": histories}, 6, leave_out=leave_out, allow=allow)
    np.testing.assert_array_equal(answer["items"], items)
    np.testing.assert_allclose(answer["scores"], scores, rtol=2e-5, atol=2e-6)


def test_an_input_has_one_meaning():
    features = [FeatureConfig(name, dim=8) for name in ("leave_out", "item")]
    model = TwoTower(EmbeddingCollection(features), items=SIZE)
    with pytest.raises(ConfigError, match="has a column 'leave_out' already"):
        two_tower_signatures(model, leave_out=True)
    with pytest.raises(ConfigError, match="k must be at most 12"):
        two_tower_signatures(model, k=13)
