"""Exported models of next items keep histories as states, which stock TensorFlow continues and searches."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.export import Publisher, export_model
from gmeta.export.sequence_models import next_item_signatures, retrieval_signatures
from gmeta.export.signature import PADDING, TEXT_PADDING
from gmeta.initializers import Constant
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import FlatRetriever, GenerativeRetriever, NextItemModel
from gmeta.models.sequence.user_states import HistoryStates
from gmeta.optimizers import SGD
from gmeta.preprocess import semantic_ids
from support.serving import ask, ask_all

ITEMS, LONGEST = 20, 5
TEXTS = [f"item/{number}" for number in range(ITEMS)]


def backbone(timed=False, longest=LONGEST):
    shape = {"blocks": 1, "heads": 2, "attention_dim": 4, "value_dim": 4, "max_length": longest}
    return HSTU(**shape, bias_by_time=timed)


def scattered(model, seed=0):
    random = np.random.default_rng(seed)
    for weight in model.trainable_variables:
        weight.assign_add(random.normal(0, 0.4, weight.shape))
    return model


def items(hashed):
    table = TableConfig("item", 8, initializer=Constant(0.1))
    return EmbeddingCollection([FeatureConfig("item", table, hash=hashed)], optimizer=SGD(0.5))


def of_texts():
    model = NextItemModel(
        items(True), backbone(timed=True), items=TEXTS, max_length=LONGEST, time="time", places="from_start"
    )
    model.compile("sgd")
    numbers = tf.ragged.constant([[3, 7, 3, 8, 1], [2, 2, 5]], tf.int64)
    texts = numbers.with_values(tf.gather(TEXTS, numbers.values))
    model.train_on_batch({"item": texts, "time": numbers})
    return scattered(model)


def texts_of(rows, start):
    """Histories of texts with times; what isn't a number of an item isn't in the catalogue."""
    texts = [[TEXTS[each] if each < ITEMS else f"new/{each}" for each in row] for row in rows]
    times = [[start + 1000 * place for place, _ in enumerate(row)] for row in rows]
    ragged = {"item": tf.ragged.constant(texts, tf.string), "time": tf.ragged.constant(times, tf.int64)}
    widest = {"item": TEXT_PADDING, "time": 0}
    return ragged, {name: each.to_tensor(widest[name]).numpy() for name, each in ragged.items()}


def states_of(answer):
    return np.array(answer["state_bytes"], object)


def joined(first, second):
    return {name: tf.concat([first[name], second[name]], axis=1) for name in first}


def test_a_server_keeps_histories_of_texts(tmp_path):
    model = of_texts()
    signatures = next_item_signatures(model, k=4, leave_out_seen=True, states="float32", checksums=True)
    assert list(signatures) == ["recommend", "query", "read", "read_on", "state_info", "recommend_on"]
    base = export_model(model, tmp_path / "1", signatures=signatures).folder
    history, sent = texts_of([[3, 99, 8], [], [5, 6, 7, 9, 1, 2]], 10**6)
    later, sent_later = texts_of([[1], [98, 4], [8]], 10**7)
    first = ask(base, "read", {**sent, "checksum": np.array([1, 2, 3])})
    assert first["unknown_history"].tolist() == [1, 0, 0]
    given = {"state_bytes": states_of(first), **sent_later, "checksum": np.array([4, 5, 6])}
    after = ask(base, "read_on", given)
    assert after["unknown_history"].tolist() == [0, 1, 0]
    here = HistoryStates(model, "float32")
    assert [len(each) for each in states_of(after)] == [
        len(each) for each in here.read_on(here.read(history), later).numpy()
    ]
    found, info, empty = ask_all(
        [
            (base, "recommend_on", {"state_bytes": states_of(after)}),
            (base, "state_info", {"state_bytes": states_of(after)}),
            (base, "recommend_on", {"state_bytes": states_of(first)}),
        ]
    )
    whole, scores = model.recommend(joined(history, later), 4, leave_out_seen=True)
    np.testing.assert_array_equal(found["items"], whole)
    np.testing.assert_allclose(found["scores"], scores, rtol=2e-4, atol=2e-5)
    assert {name: each.tolist() for name, each in info.items()} == {
        "items": [4, 2, 5],
        "time": [10**7, 10**7 + 1000, 10**7],
        "checksum": [4, 5, 6],
    }
    popular = model.recommend(history, 4, leave_out_seen=True)
    np.testing.assert_array_equal(empty["items"], popular[0])
    with pytest.raises(RuntimeError, match="state_bytes: one a sample expected"):
        ask(base, "read_on", {**given, "state_bytes": states_of(first)[:2]})
    cut = np.array([*states_of(after)[:2], states_of(after)[2][:-8]], object)
    with pytest.raises(RuntimeError, match="is cut, or is of a model of another form: read the history"):
        ask(base, "recommend_on", {"state_bytes": cut})


@pytest.mark.shown_by("test_a_server_keeps_histories_of_texts")
def test_a_delta_with_other_weights_refuses_former_states(tmp_path):
    model = of_texts()
    signatures = next_item_signatures(model, states="bfloat16")
    publisher = Publisher(model, tmp_path, dense_every="1s", export={"signatures": signatures})
    base = publisher.publish().path
    _, sent = texts_of([[3, 99, 8], [4]], 10**6)
    former = ask(base, "read", sent)
    scattered(model, 1)
    delta = {"delta_bytes": np.array(publisher.publish(dense=True).path.read_bytes(), object)}
    with pytest.raises(RuntimeError, match="was read by other weights than these: read the history again"):
        ask_all([(base, "apply_delta", delta), (base, "recommend_on", {"state_bytes": states_of(former)})])
    _, anew = ask_all([(base, "apply_delta", delta), (base, "read", sent)])
    _, found = ask_all(
        [(base, "apply_delta", delta), (base, "recommend_on", {"state_bytes": states_of(anew)})]
    )
    right = model.recommend(texts_of([[3, 99, 8], [4]], 10**6)[0])
    np.testing.assert_array_equal(found["items"], right[0])


def retriever(kind):
    ids = semantic_ids(np.random.default_rng(0).normal(size=(ITEMS, 3)), levels=2, codes=4)
    read = {"max_length": LONGEST, "beam": 12, "ks": (4,)}
    if kind == "flat":
        return scattered(FlatRetriever(backbone(longest=20), ids, dim=8, **read))
    return scattered(GenerativeRetriever(items(False), backbone(), ids, width=8, places="from_start", **read))


@pytest.mark.shown_by(case="flat")
@pytest.mark.parametrize("kind", ["flat", "codes"])
def test_a_server_searches_codes_from_states(kind, tmp_path):
    model, chosen = retriever(kind), {"beam": 8, "allow": np.arange(ITEMS) % 3 > 0, "leave_out_seen": True}
    signatures = retrieval_signatures(model, k=4, states="float32", **chosen)
    assert list(signatures) == ["retrieve", "read", "read_on", "state_info", "retrieve_on"]
    base = export_model(model, tmp_path / "1", signatures=signatures).folder
    history = {"item": tf.ragged.constant([[3, 99, 8], [], [5, 6, 7, 9, 1, 2]], tf.int64)}
    later = {"item": tf.ragged.constant([[1], [], [8]], tf.int64)}
    sent, more = ({"item": each["item"].to_tensor(PADDING).numpy()} for each in (history, later))
    after = ask(base, "read_on", {"state_bytes": states_of(ask(base, "read", sent)), **more})
    found = ask(base, "retrieve_on", {"state_bytes": states_of(after)})
    whole, scores = model.retrieve(joined(history, later), 4, **chosen)
    np.testing.assert_array_equal(found["items"], whole)
    np.testing.assert_allclose(found["scores"], scores, rtol=2e-4, atol=2e-5)


def test_settings_of_states_without_states_are_refused():
    model = retriever("codes")
    for settings in ({"stale": "apply"}, {"checksums": True}):
        with pytest.raises(ConfigError, match="are settings of states: give their dtype"):
            retrieval_signatures(model, **settings)
