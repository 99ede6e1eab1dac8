"""States of histories: what was kept of them answers as the model does for the whole histories."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, FuXi, TableConfig
from gmeta.losses import SampledSoftmax
from gmeta.models import FlatRetriever, GenerativeRetriever, NextItemModel, TwoTower
from gmeta.models.sequence.user_states import HistoryStates
from gmeta.ops import AttentionMask
from gmeta.preprocess import semantic_ids

ITEMS, LONGEST, K = 30, 6, 5
KINDS = {
    "from_start": {"time": "time"},
    "production": {"form": "production", "mask": AttentionMask(window=2)},
    "cosines": {"time": "time", "loss": SampledSoftmax(temperature=0.1, normalize=True)},
    "plain": {"norm": False, "repeats": False},
    "from_end": {"time": "time", "places": "from_end"},
    "codes": {"time": "time"},
    "codes_from_end": {"places": "from_end"},
    "flat": {"time": "time"},
    "flat_window": {"mask": AttentionMask(window=5), "form": "production"},
}


@functools.cache
def of_kind(kind):
    return make(kind)


def make(kind, **changed):
    chosen = {"max_length": LONGEST, "ks": (K,), **KINDS[kind], **changed}
    hstu = {name: chosen.pop(name) for name in ("form", "mask") if name in chosen}
    flat = kind.startswith("flat")
    backbone = HSTU(
        blocks=2,
        heads=2,
        attention_dim=3,
        value_dim=4,
        max_length=8 if flat else LONGEST,
        bias_by_time="time" in chosen,
        **hstu,
    )
    ids = semantic_ids(np.random.default_rng(0).normal(size=(ITEMS, 3)), levels=2, codes=4)
    if flat:
        model = FlatRetriever(backbone, ids, dim=8, beam=12, **chosen)
    else:
        chosen = {"places": "from_start", **chosen}
        table = TableConfig("item", 8, initializer=Normal(0.0, 0.3))
        collection = EmbeddingCollection([FeatureConfig("item", table)])
        if kind.startswith("codes"):
            model = GenerativeRetriever(collection, backbone, ids, width=8, beam=12, **chosen)
        else:
            model = NextItemModel(collection, backbone, items=ITEMS, **chosen)
    random = np.random.default_rng(0)
    for weight in model.trainable_variables:  # so that attention and biases aren't lost beside the tokens
        weight.assign_add(random.normal(0, 0.4, weight.shape))
    model.catalogue.count(tf.constant([4, 4, 4, 2, 2, 9], tf.int64))
    return model


def drawn(random, lengths, start=0, most=ITEMS + 4):
    """Histories, some of whose items aren't in the catalogue."""
    items = random.integers(0, most, sum(lengths))
    times = [np.sort(start + random.integers(0, 10**5, length)) for length in lengths]
    columns = {"item": items, "time": np.concatenate([np.zeros(0, np.int64), *times]).astype(np.int64)}
    return {name: tf.RaggedTensor.from_row_lengths(column, lengths) for name, column in columns.items()}


def joined(first, second):
    return {name: tf.concat([first[name], second[name]], axis=1) for name in first}


def assert_same(found, right, rtol=2e-4, atol=2e-5):
    """Equal scores, and equal items but where scores are as near as rounding."""
    items, scores = (np.asarray(each) for each in found)
    of_right, right = (np.asarray(each) for each in right)
    np.testing.assert_allclose(scores, right, rtol=rtol, atol=atol)
    finite = np.where(np.isinf(right), -1e30, right)
    gaps = np.abs(np.diff(finite, axis=1, prepend=np.inf, append=-np.inf))
    clear = np.minimum(gaps[:, :-1], gaps[:, 1:]) > 2 * (atol + rtol * np.abs(right))
    clear |= np.isinf(right)
    np.testing.assert_array_equal(np.where(clear, items, 0), np.where(clear, of_right, 0))


def assert_answers(states, state, model, batch, settings=3, **close):
    """The model's methods answer from the state as from the whole history, with so many settings of each."""
    if isinstance(model, NextItemModel):
        for seen in (True, False)[:settings]:
            found = states.recommend(state, K, leave_out_seen=seen)
            assert_same(found, model.recommend(batch, K, leave_out_seen=seen), **close)
    if not isinstance(model, NextItemModel) or isinstance(model, GenerativeRetriever):
        allow = np.arange(ITEMS) % 3 > 0
        for chosen in ({"leave_out_seen": True, "beam": 9}, {"allow": allow}, {})[:settings]:
            assert_same(states.retrieve(state, K, **chosen), model.retrieve(batch, K, **chosen), **close)


@settings(max_examples=4, deadline=None)
@given(
    users=st.integers(1, 4),
    kind=st.sampled_from(sorted(KINDS)),
    most=st.sampled_from([2, LONGEST + 1, LONGEST + 4]),
    seed=st.integers(0, 99),
)
def test_read_and_read_on_in_pieces_answer_as_the_whole_history(users, kind, most, seed):
    random, model = np.random.default_rng(seed), of_kind(kind)
    states = HistoryStates(model, "float32")
    history = drawn(random, random.integers(0, most, users))
    state = states.read(history)
    assert_answers(states, state, model, history, settings=1)
    for piece in range(2):
        later = drawn(random, random.integers(0, 4, users), 10**6 * (piece + 1))
        state, history = states.read_on(state, later), joined(history, later)
    assert_answers(states, state, model, history, settings=1)
    np.testing.assert_array_equal(
        tf.strings.length(state), tf.strings.length(states.read(history)), "as many tokens"
    )
    items = np.minimum(history["item"].row_lengths(), LONGEST)
    about = states.about(state)
    np.testing.assert_array_equal(about["items"], items)
    if model.time is not None:
        latest = [int(times[-1]) if len(times) else 0 for times in history["time"]]
        np.testing.assert_array_equal(about["time"], latest)
    tokens = 1 + items * model.codes.levels if kind.startswith("flat") else items
    of_format = states.format.fixed_bytes + states.format.token_bytes * tokens
    np.testing.assert_array_equal(tf.strings.length(state), of_format)


@pytest.mark.shown_by(case=["from_start", "from_end", "flat"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_histories_at_the_limit_are_continued_exactly(kind):
    model, random = of_kind(kind), np.random.default_rng(3)
    states = HistoryStates(model, "float32")
    history = drawn(random, [LONGEST - 1, LONGEST, LONGEST + 5, 0, 1])
    state = states.read(history)
    for lengths in ([1, 1, 0, LONGEST, LONGEST + 2], [1, 0, 1, 0, 1]):
        later = drawn(random, lengths, 10**6)
        history = joined(history, later)
        former, state = state.numpy(), states.read_on(state, later)
        assert_answers(states, state, model, history, settings=3 if lengths[0] else 2)
    begin = states.format.fixed_bytes - 8
    first = slice(begin, begin + states.format.token_bytes)
    kept = [old[first] == new[first] for old, new in zip(former, state.numpy(), strict=True)]
    assert kept[1]  # nothing came, so the first token stayed
    assert not kept[2] or kind.startswith("flat")  # the window moved


@pytest.mark.parametrize("kind", ["from_start", "codes", "flat"])
def test_users_without_known_items_get_popular_ones(kind):
    model, states = of_kind(kind), HistoryStates(of_kind(kind))
    history = drawn(np.random.default_rng(0), [0, 2])
    history["item"] = tf.ones_like(history["item"]) * (ITEMS + 1)
    state = states.read(history)
    ask = states.retrieve if kind == "flat" else states.recommend
    np.testing.assert_array_equal(ask(state, 3)[0], [[4, 2, 9]] * 2)
    state = states.read_on(state, drawn(np.random.default_rng(1), [1, 0], 10**6, most=ITEMS))
    assert ask(state, 3)[0].numpy()[1].tolist() == [4, 2, 9]
    later = drawn(np.random.default_rng(1), [1, 0], 10**6, most=ITEMS)
    right = (model.retrieve if kind == "flat" else model.recommend)(joined(history, later), 3)
    np.testing.assert_array_equal(ask(state, 3)[0], right[0])


@pytest.mark.shown_by(case=["from_start-bfloat16-0.05", "flat-int8-0.1"])
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.05), ("int8", 0.1)])
@pytest.mark.parametrize("kind", ["from_start", "codes", "flat"])
def test_fewer_bits_round_keys_and_values_only(kind, dtype, most):
    model, random = of_kind(kind), np.random.default_rng(5)
    exact, states = HistoryStates(model, "float32"), HistoryStates(model, dtype)
    history, later = drawn(random, [3, 1, 0]), drawn(random, [2, 1, 1], 10**6)
    state, whole = states.read(history), exact.read(history)
    right, found = (each.format.decode(of, None) for each, of in ((exact, whole), (states, state)))
    np.testing.assert_array_equal(found.vector, right.vector)
    np.testing.assert_array_equal(found.keys, right.keys)
    assert not np.array_equal(found.reading.kept[0].keys, right.reading.kept[0].keys)
    if kind != "flat":  # its beams attend to keys and values
        assert_answers(states, state, model, history)
    found = states.format.decode(states.read_on(state, later), None).vector
    right = exact.format.decode(exact.read_on(whole, later), None).vector
    scale = np.abs(right).max()
    np.testing.assert_allclose(found, right, rtol=0, atol=most * scale)
    assert np.abs(found - right).max() > 0


@pytest.mark.parametrize("kind", ["from_start", "codes_from_end", "flat"])
def test_damage_and_states_of_others_are_refused(kind):
    model, random = of_kind(kind), np.random.default_rng(7)
    states = HistoryStates(model)
    history, later = drawn(random, [4, 0, 2]), drawn(random, [1, 1, 1], 10**6)
    good = states.read(history, [1, -2, 3]).numpy()
    assert states.about(good)["checksum"].numpy().tolist() == [1, -2, 3]

    def refused(match, state=good, of=states):
        ask = of.retrieve if kind == "flat" else of.recommend
        for call in (lambda: ask(state, K), lambda: of.read_on(state, later)):
            with pytest.raises(tf.errors.InvalidArgumentError, match=match):
                call()

    for place in [*random.integers(0, len(good[0]), 6), len(good[0]) - 1]:
        bad = bytearray(good[0])
        bad[place] ^= 1 << int(random.integers(8))
        refused(r"(?s)the state .*: read the history again. Samples.*0", [bytes(bad), *good[1:]])
    for bad in (b"", good[0][:-1], good[0][:-4], good[0] + bytes(4), good[0][:-8] + good[1][-8:]):
        refused("the state .*: read the history again", [bad, *good[1:]])
    refused("holds another dtype than bfloat16", HistoryStates(model, "int8").read(history))
    other = make(kind)
    other.backbone.weights[0].assign_add(tf.ones_like(other.backbone.weights[0]))
    refused(r"(?s)was read by other weights.*\n0, 1, 2$", of=HistoryStates(other))
    applied = HistoryStates(other, stale="apply")
    ask = applied.retrieve if kind == "flat" else applied.recommend
    ask(good, K)
    continued = applied.read_on(good, later)
    if model.moves_tokens:  # all was read again
        assert_answers(HistoryStates(other), continued, other, joined(history, later))
    else:
        refused("was read by other weights", continued, HistoryStates(other))
        longer = applied.read_on(good, drawn(random, [LONGEST] * 3, 10**6))
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)was read by other weights.*\n1$"):
            HistoryStates(other).read_on(longer, later)  # the others' windows moved, and they were read again
    form = make(kind, max_length=LONGEST + 1)
    refused("is of a model with other settings", of=HistoryStates(form, stale="apply"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="a state for each user expected; users"):
        states.read_on(good[:2], later)
    with pytest.raises(tf.errors.InvalidArgumentError, match="checksums: one a user expected"):
        states.read(history, [1, 2])


def test_texts_and_their_hashes_are_the_same_items():
    texts = [f"item/{number}" for number in range(ITEMS)]
    collection = EmbeddingCollection([FeatureConfig("item", dim=8, hash=True)])
    hstu = HSTU(blocks=1, heads=1, attention_dim=4, value_dim=4, max_length=LONGEST, bias_by_time=False)
    read = {"items": texts, "max_length": LONGEST, "places": "from_start"}
    model = NextItemModel(collection, hstu, **read)
    states = HistoryStates(model, "float32")
    history = {"item": tf.ragged.constant([["item/3", "unknown", "item/8"], []])}
    later = {"item": tf.ragged.constant([["item/1"], ["item/9", "item/3"]])}
    state = states.read_on(states.read(history), later)
    assert_answers(states, state, model, joined(history, later))
    plain = of_kind("plain")
    with pytest.raises(ConfigError, match="item must be integers, got string"):
        HistoryStates(plain).read(history)


def test_mixed_precision_computes_as_a_call_does():
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        models = [make("from_start"), make("flat")]
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    for model in models:
        random, states = np.random.default_rng(2), HistoryStates(model)
        history, later = drawn(random, [3, 0]), drawn(random, [2, 1], 10**6)
        state = states.read_on(states.read(history), later)
        found = states.format.decode(state, None, kept=False).vector
        right = tf.cast(model(joined(history, later), training=False), tf.float32)
        np.testing.assert_allclose(found, right, rtol=0, atol=0.05 * np.abs(right).max())


def test_models_that_keep_nothing_are_refused():
    def next_item(backbone):
        collection = EmbeddingCollection([FeatureConfig("item", dim=8)])
        return NextItemModel(collection, backbone, items=9, max_length=5, time="time")

    shape = {"blocks": 1, "heads": 1, "attention_dim": 4, "value_dim": 4, "max_length": 5}
    with pytest.raises(ConfigError, match="FuXi keeps no keys and values, so there are no states"):
        HistoryStates(next_item(FuXi(**shape)))
    with pytest.raises(ConfigError, match="the mask must be causal, without by_time and full_tail"):
        HistoryStates(next_item(HSTU(**shape, mask=AttentionMask(by_time=True))))
    with pytest.raises(ConfigError, match="a TwoTower has no backbone, so there are no states"):
        HistoryStates(TwoTower(EmbeddingCollection([FeatureConfig("item", dim=8)]), items=9, history="item"))
    with pytest.raises(ConfigError, match="stale must be 'refuse' or 'apply', got 'keep'"):
        HistoryStates(of_kind("from_start"), stale="keep")
    states = HistoryStates(of_kind("flat"))
    with pytest.raises(ConfigError, match="a FlatRetriever has no method 'recommend'"):
        states.recommend(states.read(drawn(np.random.default_rng(0), [1])))
