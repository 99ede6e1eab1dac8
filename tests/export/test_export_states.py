"""Exported models keep what they have read of a user, and stock TensorFlow continues and scores it."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.export import Publisher, StateCache, export_model
from gmeta.export.meta_models import meta_sequence_signatures
from gmeta.export.sequence_models import state_signatures
from gmeta.export.signature import PARTS
from gmeta.initializers import Constant
from gmeta.layers import FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import GRM, MetaGRM, UserStates
from gmeta.models.meta.fast_weights import FastWeights
from gmeta.optimizers import SGD
from support.drawn_batches import draw_exposures
from support.serving import ask, ask_all, padded

START = Constant(0.1)
EVENTS, SHOWN = [4, 0, 6], [3, 2, 4]


@pytest.fixture
def model():
    return make()


def make(**settings):
    features = [
        FeatureConfig(name, TableConfig(name, 8, initializer=START), hash=name == "item")
        for name in ("item", "city", "action")
    ]
    model = GRM.of(
        features,
        contexts=["city"],
        history=["item", "action"],
        targets=["item"],
        time="time",
        dim=8,
        blocks=1,
        max_length=10,
        expert_units=[8],
        tower_units=[8],
        scenario="scene",
        scenarios=2,
        optimizer=SGD(0.5),
        **settings,
    )
    model.compile("sgd")
    train(model, 1)
    return model


def drawn(seed, events=EVENTS, shown=SHOWN):
    batch = draw_exposures(seed, events, shown)
    batch["targets"]["time"] += 10**9  # candidates come after everything else
    for part in ("history", "targets"):
        batch[part]["item"] = tf.strings.as_string(batch[part]["item"])
    return batch


def train(model, seed):
    model.train_on_batch(drawn(seed))
    for weight in model.trunk.weights:
        weight.assign_add(tf.random.stateless_normal(weight.shape, [seed, 1], stddev=0.3))


def sent(model, batch, part):
    names = [*getattr(model.columns, part), *(["time"] if part != "contexts" else [])]
    names += ["scene"] if part == "targets" else []
    return padded({f"{part}_{name}": batch[part][name] for name in names})


def states_of(answer):
    return np.array(answer["state_bytes"], object)


def test_a_server_reads_continues_and_scores(model, tmp_path):
    signatures = state_signatures(model, dtype="float32", checksums=True)
    base = export_model(model, tmp_path / "1", signatures=signatures).folder
    batch, later = drawn(2), drawn(3, [2, 1, 0])
    later["history"]["time"] += 10**7
    given = {**sent(model, batch, "contexts"), **sent(model, batch, "history")}
    first = ask(base, "read", {**given, "checksum": np.array([1, 2, 3])})
    here = UserStates(model, "float32").read(batch, [1, 2, 3]).numpy()
    assert [len(state) for state in states_of(first)] == [len(state) for state in here]
    new = sent(model, later, "history")
    after = ask(base, "read_on", {"state_bytes": states_of(first), **new, "checksum": np.array([4, 5, 6])})
    targets = sent(model, batch, "targets")
    info, scores = ask_all(
        [
            (base, "state_info", {"state_bytes": states_of(after)}),
            (base, "score", {"state_bytes": states_of(after), **targets}),
        ]
    )
    assert info["checksum"].tolist() == [4, 5, 6]
    assert info["tokens"].tolist() == [7, 2, 7]
    history = {
        name: tf.concat([column, later["history"][name]], 1) for name, column in batch["history"].items()
    }
    logits = model({**batch, "history": history}, training=False)
    for task, name in (("ctr", "click"), ("cvr", "cvr"), ("ctcvr", "buy")):
        np.testing.assert_allclose(scores[f"{name}_logit"], logits[task].to_tensor(), rtol=2e-4, atol=2e-5)
        there = tf.ones_like(logits[task]).to_tensor()
        right = tf.sigmoid(scores[f"{name}_logit"]) * there
        np.testing.assert_allclose(scores[name], right, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="state_bytes: one a sample expected"):
        ask(base, "score", {"state_bytes": states_of(after)[:2], **targets})
    cut = np.array([*states_of(after)[:2], states_of(after)[2][:-8]], object)
    with pytest.raises(RuntimeError, match="is cut, or is of a model of another form: read the history"):
        ask(base, "score", {"state_bytes": cut, **targets})


@pytest.mark.shown_by("test_a_server_reads_continues_and_scores")
def test_a_delta_with_other_weights_refuses_former_states(model, tmp_path):
    publisher = Publisher(model, tmp_path, dense_every="1s", export={"signatures": state_signatures(model)})
    base = publisher.publish().path
    batch = drawn(2)
    given = {**sent(model, batch, "contexts"), **sent(model, batch, "history")}
    former, targets = ask(base, "read", given), sent(model, batch, "targets")
    train(model, 4)
    delta = {"delta_bytes": np.array(publisher.publish(dense=True).path.read_bytes(), object)}
    _, anew = ask_all([(base, "apply_delta", delta), (base, "read", given)])
    requests = [(base, "apply_delta", delta), (base, "score", {"state_bytes": states_of(former), **targets})]
    with pytest.raises(RuntimeError, match="was read by other weights than these: read the history again"):
        ask_all(requests)
    _, scores = ask_all(
        [(base, "apply_delta", delta), (base, "score", {"state_bytes": states_of(anew), **targets})]
    )
    right = model(batch, training=False)["ctr"].to_tensor()
    np.testing.assert_allclose(scores["click_logit"], right, rtol=0, atol=0.05)  # bfloat16


def test_a_user_adapts_from_a_state_as_from_the_whole_history():
    ranker = make(report=None)
    adapting = MetaGRM(ranker, inner=InnerLoop(steps=2, learning_rate=0.3, adapt=["mixture", "heads"]))
    adapting.compile("sgd")
    answer = {
        name: signature.function
        for name, signature in meta_sequence_signatures(adapting, states="float32").items()
    }
    batch = drawn(2)
    user = {name: tf.constant(each[:1]) for part in PARTS for name, each in sent(ranker, batch, part).items()}
    state = {"state_bytes": answer["read"](user)["state_bytes"]}
    labels = {f"labels_{name}": batch["labels"][name].to_tensor()[:1] for name in ("click", "buy")}
    whole = answer["adapt"]({**user, **labels})["weights_bytes"].numpy()
    kept = answer["adapt_on"]({**user, **state, **labels})["weights_bytes"].numpy()
    weights, others = (FastWeights.from_bytes(each).deltas for each in (whole, kept))
    assert any(np.abs(delta).max() > 1e-4 for delta in weights.values())
    for name, delta in weights.items():
        np.testing.assert_allclose(others[name], delta, rtol=1e-3, atol=1e-6, err_msg=name)
    right = answer["predict_with"]({**user, "weights_bytes": tf.constant(whole)})
    found = answer["score_with"]({**user, **state, "weights_bytes": tf.constant(kept)})
    shared = answer["score"]({**user, **state})
    np.testing.assert_allclose(found["click_logit"], right["click_logit"], rtol=1e-3, atol=1e-5)
    assert np.abs(found["click_logit"] - shared["click_logit"]).max() > 1e-4


def test_a_cache_drops_what_was_used_least_recently():
    cache = StateCache(max_bytes=10)
    for user, size in (("a", 4), ("b", 4), ("a", 5)):
        cache.put(user, bytes(size))
    assert cache.get("b") == bytes(4)
    cache.put("c", bytes(3))  # 12 bytes: "a" goes
    assert [cache.get(user) for user in "abc"] == [None, bytes(4), bytes(3)]
    cache.put("big", bytes(11))
    assert cache.get("big") is None
    cache.put("b", bytes(11))  # a state that grew beyond the cache doesn't stay as it was
    assert cache.get("b") is None
    cache.drop("c")
    cache.drop("nobody")
    assert cache.counts == (3, 3, 3, 0, 0)
