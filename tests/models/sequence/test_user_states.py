"""States of users: what was kept of a history scores candidates as the whole sequence does."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.core.row_formats import RowFormat
from gmeta.layers import HSTU, FeatureConfig
from gmeta.models import GRM, UserStates
from gmeta.ops import AttentionMask

FEATURES = [("city", 6), ("item", 6), ("action", 6), ("shop", 6)]


KINDS = (
    {},
    {"timed": False, "combine": "sum"},
    {"form": "production", "mask": AttentionMask(window=3)},
    {"scenario": "place"},
    {"scenario": "city"},
    {"contexts": ()},
)


@functools.cache
def of_kind(kind):
    return make(**KINDS[kind])


def make(*, timed=True, scenario=None, combine="concat", form="research", mask=None, contexts=("city",)):
    features = [FeatureConfig(name, dim=dim) for name, dim in FEATURES if name != "city" or contexts]
    hstu = HSTU(
        blocks=2,
        heads=2,
        attention_dim=3,
        value_dim=4,
        max_length=20,
        bias_by_place=False,
        bias_by_time=timed,
        form=form,
        mask=mask,
    )
    model = GRM.of(
        features,
        contexts=list(contexts),
        history=["item", "action"],
        targets=["item", "shop"],
        time="time" if timed else None,
        scenario=scenario,
        scenarios=1 if scenario is None else 3,
        combine=combine,
        dim=6,
        backbone=hstu,
    )
    random = np.random.default_rng(0)
    for weight in model.trunk.weights:  # so that attention and biases aren't lost beside the tokens
        weight.assign(weight + random.normal(0, 0.5, weight.shape))
    return model


def draw(random, lengths, names, start):
    """Columns of ids, and of times from ``start`` on."""
    flat = {name: random.integers(0, 30, sum(lengths)) for name in names}
    times = [np.sort(start + random.integers(0, 10**5, length)) for length in lengths]
    flat["time"] = np.concatenate([np.zeros(0, np.int64), *times])
    return {name: tf.RaggedTensor.from_row_lengths(column, lengths) for name, column in flat.items()}


def parts(random, users, events, more, candidates, scenario=None):
    """Contexts, histories, the events that follow, and candidates."""
    contexts = {"city": tf.constant(random.integers(0, 3, users))}
    history = draw(random, events, ("item", "action"), 10**6)
    later = draw(random, more, ("item", "action"), 10**7)
    targets = draw(random, candidates, ("item", "shop"), 10**8)
    if scenario == "place":
        where = random.integers(0, 3, sum(candidates))
        targets["place"] = tf.RaggedTensor.from_row_lengths(where, candidates)
    return contexts, history, later, targets


def joined(first, second):
    return {name: tf.concat([first[name], second[name]], axis=1) for name in first}


def assert_scores(found, model, contexts, history, targets, **close):
    right = model({"contexts": contexts, "history": history, "targets": targets}, training=False)
    for name, logits in right.items():
        np.testing.assert_array_equal(found[name].row_splits, logits.row_splits)
        np.testing.assert_allclose(found[name].flat_values, logits.flat_values, err_msg=name, **close)


@settings(max_examples=6, deadline=None)
@given(
    users=st.integers(1, 4),
    kind=st.integers(0, len(KINDS) - 1),
    at_once=st.sampled_from([1, 2, 256]),
    seed=st.integers(0, 99),
)
def test_a_state_scores_as_the_whole_sequence_does(users, kind, at_once, seed):
    random, model = np.random.default_rng(seed), of_kind(kind)
    sizes = [random.integers(0, most, users) for most in (7, 4, 6)]
    contexts, history, later, targets = parts(random, users, *sizes, KINDS[kind].get("scenario"))
    states = UserStates(model, "float32", at_once=at_once)
    close = {"rtol": 2e-4, "atol": 2e-5}  # sums of float32 in another order, two blocks and the towers
    state = states.read({"contexts": contexts, "history": history})
    given = {"contexts": contexts, "targets": targets}
    assert_scores(states.score(state, given), model, contexts, history, targets, **close)
    for _ in range(2):
        state = states.read_on(state, {"history": later})
        history = joined(history, later)
        assert_scores(states.score(state, given), model, contexts, history, targets, **close)
        later = {name: column + (10**7 if name == "time" else 0) for name, column in later.items()}
    whole = states.read({"contexts": contexts, "history": history})
    assert tf.reduce_all(tf.strings.length(whole) == tf.strings.length(state))
    length = states.format.fixed_bytes + states.format.token_bytes * (
        len(model.columns.contexts) + history["item"].row_lengths()
    )
    np.testing.assert_array_equal(tf.strings.length(state), length)


@pytest.fixture(scope="module")
def model():
    return of_kind(0)


@pytest.fixture(scope="module")
def drawn():
    return parts(np.random.default_rng(7), 3, [5, 0, 2], [2, 1, 0], [3, 2, 4])


@pytest.mark.parametrize("timed", [True, False])
def test_a_user_without_anything_is_scored(timed):
    model, random = make(timed=timed, contexts=()), np.random.default_rng(0)
    _, nothing, later, targets = parts(random, 1, [0], [2], [3])
    states = UserStates(model, "float32")
    state = states.read({"history": nothing})
    close = {"rtol": 2e-4, "atol": 2e-5}
    assert_scores(states.score(state, {"targets": targets}), model, {}, nothing, targets, **close)
    assert states.about(state)["tokens"].numpy().tolist() == [0]
    state = states.read_on(state, {"history": later})
    assert_scores(states.score(state, {"targets": targets}), model, {}, later, targets, **close)


@pytest.mark.parametrize("form", ["research", "production"])
def test_mixed_precision_computes_as_a_call_does(form, drawn):
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = make(form=form)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    contexts, history, later, targets = drawn
    states = UserStates(model)
    state = states.read({"contexts": contexts, "history": history})
    given = {"contexts": contexts, "targets": targets}
    close = {"rtol": 0, "atol": 0.05}  # 8 bits of a number
    assert_scores(states.score(state, given), model, contexts, history, targets, **close)
    state = states.read_on(state, {"history": later})
    assert_scores(states.score(state, given), model, contexts, joined(history, later), targets, **close)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.05), ("int8", 0.05)])
def test_fewer_bits_round_keys_and_values_and_nothing_else(model, drawn, dtype, most):
    contexts, history, _, targets = drawn
    exact, states = UserStates(model, "float32"), UserStates(model, dtype)
    x = {"contexts": contexts, "history": history}
    right = exact.format.decode(exact.read(x), None)
    found = states.format.decode(states.read(x), None)
    np.testing.assert_array_equal(found.vector, right.vector)
    np.testing.assert_array_equal(found.reading.times, right.reading.times)
    for own, other in zip(found.reading.kept, right.reading.kept, strict=True):
        for name, dim in (("keys", 3), ("values", 4)):
            rows = getattr(other, name).numpy().reshape(-1, dim)
            words = RowFormat(dtype, dim).encode(rows)
            packed = words.view(np.uint16 if dtype == "bfloat16" else np.int8)
            if dtype == "bfloat16":
                rounded = (packed[:, :dim].astype(np.uint32) << 16).view(np.float32)
            else:
                rounded = packed[:, 4 : 4 + dim] * words[:, :1].view(np.float32)
            np.testing.assert_array_equal(getattr(own, name).numpy().reshape(-1, dim), rounded)
    scores = states.score(states.read(x), {"targets": targets})
    assert_scores(scores, model, contexts, history, targets, rtol=0, atol=most)


def test_bytes_are_as_documented_and_appending_keeps_them(model, drawn):
    contexts, history, later, _ = drawn
    states = UserStates(model, "float32")
    x = {"contexts": contexts, "history": history}
    first = states.read(x, checksums=[5, -6, 7]).numpy()
    after = states.read_on(first, {"history": later}, checksums=[8, 9, 10]).numpy()
    digest = states.digest().numpy().tobytes()
    for state, tokens, checksum in zip(first, [6, 1, 3], [5, -6, 7], strict=True):
        words = np.frombuffer(state, "<i4")
        assert state[:4] == b"gmS\1"
        assert state[8:16] == digest
        assert words[4:8].view("<i8").tolist() == [checksum, tokens]
        whole = tf.raw_ops.Fingerprint(data=[state[:-8]], method="farmhash64").numpy().tobytes()
        assert state[-8:] == whole
        assert len(state) == 4 * (8 + 6 + 2) + tokens * 4 * (2 + 2 * 2 * (3 + 4))
    for former, state, kept in zip(first, after, [5, 1, 2], strict=True):  # all but the last event
        begin = 4 * (8 + 6)
        end = begin + kept * states.format.token_bytes
        assert former[begin:end] == state[begin:end]
    about = states.about(after)
    assert about["tokens"].numpy().tolist() == [8, 2, 3]
    assert about["checksum"].numpy().tolist() == [8, 9, 10]
    latest = [int(times[-1]) for times in joined(history, later)["time"]]
    assert about["time"].numpy().tolist() == latest


def test_damage_and_states_of_others_are_refused(model, drawn):
    contexts, history, _, targets = drawn
    states = UserStates(model)
    given = {"targets": targets}
    x = {"contexts": contexts, "history": history}
    good = states.read(x).numpy()
    random = np.random.default_rng(1)

    def refused(bad, match, of=states):
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            of.score([good[0], bad, good[2]], given)

    for place in [*range(32), *random.integers(32, len(good[1]), 8), len(good[1]) - 1]:
        bad = bytearray(good[1])
        bad[place] ^= 1 << int(random.integers(8))
        refused(bytes(bad), r"(?s)the state .*: read the history again. Samples.*1")
    for bad in (b"", b"abc", good[1][:-1], good[1][:-4], good[1] + b"\0" * 4, good[0][:-8] + good[1][-8:]):
        refused(bad, "the state .*: read the history again")
    refused(UserStates(model, "int8").read(x).numpy()[1], "holds another dtype than bfloat16")
    other = make()
    other.trunk.weights[0].assign_add(tf.ones_like(other.trunk.weights[0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)was read by other weights.*0, 1, 2"):
        UserStates(other).score(good, given)
    applied = UserStates(other, stale="apply")
    applied.score(good, given)
    nothing = {name: column[:, :0] for name, column in history.items()}
    continued = applied.read_on(good, {"history": nothing})  # some tokens stay those of the former weights
    with pytest.raises(tf.errors.InvalidArgumentError, match="was read by other weights"):
        UserStates(other).score(continued, given)
    form = make(mask=AttentionMask(window=2))
    form.set_weights(model.get_weights())
    with pytest.raises(tf.errors.InvalidArgumentError, match="is of a model with other settings"):
        UserStates(form, stale="apply").score(good, given)
    with pytest.raises(tf.errors.InvalidArgumentError, match="checksums: one a user expected"):
        states.read(x, checksums=[1, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match="a state for each user expected; users"):
        states.score(good[:2], given)


def test_models_that_keep_nothing_are_refused():
    item = FeatureConfig("item", dim=6)
    fuxi = GRM.of([item], contexts=[], history=["item"], targets=["item"], dim=6, backbone="fuxi")
    with pytest.raises(ConfigError, match="FuXi keeps no keys and values, so there are no states"):
        UserStates(fuxi)
    with pytest.raises(ConfigError, match="the mask must be causal, without by_time and full_tail"):
        UserStates(make(mask=AttentionMask(by_time=True)))
    with pytest.raises(ConfigError, match="contexts that see the history can't be kept"):
        UserStates(make(mask=AttentionMask(contexts_see="history")))
    with pytest.raises(ConfigError, match="stale must be 'refuse' or 'apply', got 'keep'"):
        UserStates(make(), stale="keep")
    with pytest.raises(ConfigError, match="rows must be float32, bfloat16, int8, got dtype='float16'"):
        UserStates(make(), "float16")
