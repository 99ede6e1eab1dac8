"""From a Parquet log of strings to answers of an exported model in stock TensorFlow: every kind of model,
trained on one rank and on two.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta import io, layers, meta, models, ops
from gmeta.checkpoint.callback import ShardedCheckpoint
from gmeta.cli import main
from gmeta.export.saved_model import export_model
from gmeta.models.sequence.grm_model import GRM
from support.data_files import TAGS, write_click_log
from support.process_ranks import run_ranks
from support.serving import ask

ITEMS = [f"item-{number}" for number in range(20)]
# What a client knows of three samples: text as the log has it, once of things that the log hasn't.
ITEM, CITY, USER = ["item-7", "item-8", "never seen"], ["city 1", "Zürich", "city 2"], ["user-3", "you", "me"]
TAGGED = [[TAGS[0], TAGS[1]], [], ["音楽", TAGS[2]]]
PRICE = np.array([12.5, 3.0, 0.5], np.float32)


class Made(NamedTuple):
    """A compiled model and what it is trained on."""

    model: Any
    data: tf.data.Dataset


def ordinary(data: Path) -> Made:
    inputs = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in ("user_id", "item_id", "city")}
    inputs["tags"] = tf.keras.Input([None], name="tags", dtype=tf.int64, ragged=True)
    price = tf.keras.Input([], name="price")
    vectors = layers.EmbeddingCollection(features("user_id", "item_id", "city", "tags"))(inputs)
    x = tf.keras.layers.Concatenate()([*vectors.values(), tf.math.log1p(price)[:, tf.newaxis]])
    model = models.Model({**inputs, "price": price}, tf.keras.layers.Dense(1, name="click")(x))
    model.compile("adam", tf.keras.losses.BinaryCrossentropy(from_logits=True))
    return Made(model, io.rows(data / "train", batch_size=64))


def meta_model(data: Path) -> Made:
    network = tf.keras.Sequential([tf.keras.layers.Dense(1, name="out")])
    collection = layers.EmbeddingCollection(features("item_id", "city", "tags"))
    model = models.MetaModel(collection, network)
    inner = meta.InnerLoop(steps=1, learning_rate=0.1, adapt=["out"])
    model.compile("adam", tf.keras.losses.BinaryCrossentropy(from_logits=True), inner=inner)
    columns = ["item_id", "city", "tags"]
    return Made(model, io.tasks(data / "train", tasks_per_batch=8, query=4, features=columns))


def ranker(data: Path) -> Made:
    model = GRM.of(
        features("city", "item_id"),
        contexts=["city"],
        history=["item_id"],
        targets=["item_id"],
        labels={"ctr": "click"},
        time="ts",
        dim=8,
        blocks=1,
        max_length=50,
    )
    model.compile("adam")
    columns = {part: ["item_id", "ts"] for part in ("history", "targets")}
    split = data / "train"
    sequences = io.sequences(split, **columns, contexts=["city"], exposed=4, sequences_per_batch=8)
    return Made(model, sequences)


def next_item(data: Path) -> Made:
    backbone = layers.HSTU(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=50)
    collection = layers.EmbeddingCollection(features("item_id"))
    model = models.NextItemModel(
        collection, backbone, items=ITEMS, item="item_id", max_length=50, time="ts", negatives=16
    )
    model.compile("adam")
    split = data / "train"
    sequences = io.sequences(split, history=["item_id", "ts"], sequences_per_batch=8)
    return Made(model, sequences.map(lambda batch: batch["history"]))


def features(*names: str) -> list[layers.FeatureConfig]:
    combiner = {"tags": "mean"}
    return [layers.FeatureConfig(name, dim=8, combiner=combiner.get(name), hash=True) for name in names]


KINDS = {"ordinary": ordinary, "meta": meta_model, "grm": ranker, "next_item": next_item}


def train(kind: str, data: Path, folder: Path) -> None:
    """Train one epoch, and save what it came to; on each rank."""
    made = KINDS[kind](data)
    ShardedCheckpoint(folder).fit(made.model, made.data, epochs=1, verbose=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    log = write_click_log(folder / "clicks", users=24, rows=16, items=len(ITEMS))
    words = ["--data", str(log), "--task", "user_id", "--time", "ts", "--label", "click"]
    ran = CliRunner().invoke(main, ["prepare", *words, "--out", str(folder / "data")])
    assert ran.exit_code == 0, ran.output
    return folder / "data"


# All kinds on one rank and on two take minutes: one of them isn't slow.
QUICK = ("ordinary", 2)
CASES = [
    pytest.param((kind, ranks), id=f"{kind}-np{ranks}", marks=[pytest.mark.slow] * ((kind, ranks) != QUICK))
    for kind in KINDS
    for ranks in (1, 2)
]


@pytest.fixture(scope="module", params=CASES)
def trained(request, data, tmp_path_factory):
    """A kind, its model as one process has it after training, and its SavedModel."""
    kind, ranks = request.param
    folder = tmp_path_factory.mktemp(kind)
    if ranks == 1:
        train(kind, data, folder / "checkpoints")
    else:
        run_ranks(train, ranks, kind, data, folder / "checkpoints")
    made = KINDS[kind](data)
    assert ShardedCheckpoint(folder / "checkpoints").restore(made.model) == 1
    export_model(made.model, folder / "served")
    return kind, made, folder / "served"


def texts(values: Any) -> Any:
    return np.array([text.encode() for text in np.ravel(values)], object).reshape(np.shape(values))


def matrix(rows: Any) -> Any:
    """Rows of text as clients send them."""
    width = max(map(len, rows))
    return texts([[*row, *[""] * (width - len(row))] for row in rows])


def numbers_of(values: Any) -> tf.Tensor:
    return ops.hash_text(tf.constant(values))


def ragged_numbers(rows: Any) -> tf.RaggedTensor:
    found = tf.ragged.constant(rows, tf.string)
    return found.with_flat_values(ops.hash_text(found.flat_values))


def samples() -> dict[str, Any]:
    """What the models themselves take of the three samples."""
    known = {"item_id": ITEM, "city": CITY, "user_id": USER}
    return {
        **{name: numbers_of(values) for name, values in known.items()},
        "tags": ragged_numbers(TAGGED),
        "price": tf.constant(PRICE),
    }


@pytest.mark.shown_by(
    "export/test_export_text.py::test_a_functional_model_answers_text_whatever_it_was_trained_on"
)
def test_the_served_model_answers_text_as_the_trained_one_answers_its_numbers(trained):
    kind, made, served = trained
    check = CHECKS[kind]
    check(made, served)


def check_ordinary(made: Made, served: Path) -> None:
    sent = {"item_id": texts(ITEM), "city": texts(CITY), "user_id": texts(USER), "tags": matrix(TAGGED)}
    answer = ask(served, "serving_default", {**sent, "price": PRICE})
    expected = np.ravel(made.model(samples()))
    np.testing.assert_allclose(np.ravel(answer["output"]), expected, rtol=1e-5, atol=1e-6)
    assert len(set(expected.tolist())) == 3


def check_meta(made: Made, served: Path) -> None:
    sent = {"item_id": texts(ITEM), "city": texts(CITY), "tags": matrix(TAGGED)}
    labels = np.array([1.0, 0.0, 1.0], np.float32)
    deltas = ask(served, "adapt", {**sent, "label": labels})["weights_bytes"]
    answer = ask(served, "predict_with", {**sent, "weights_bytes": deltas})
    known = {"item_id": ITEM, "city": CITY, "tags": TAGGED}
    fast = made.model.adapt(known, labels)
    expected = np.ravel(made.model.predict(known, weights=fast))
    logits = next(value for name, value in answer.items() if "prob" not in name)
    np.testing.assert_allclose(np.ravel(logits), expected, rtol=1e-5, atol=1e-6)


def check_ranker(made: Made, served: Path) -> None:
    """Two users; the second one's history is shorter, and the first one's exposures are fewer."""
    rows_of = {
        "history": [["item-1", "item-2", "never seen"], ["item-3"]],
        "targets": [["item-4"], ["item-5", "item-6"]],
    }
    sent: dict[str, Any] = {"contexts_city": texts(CITY[:2])}
    batch: dict[str, Any] = {"contexts": {"city": numbers_of(CITY[:2])}}
    for part, rows in rows_of.items():
        times = tf.ragged.constant([list(range(7, 7 + len(row))) for row in rows], tf.int64)
        sent[f"{part}_item_id"], sent[f"{part}_ts"] = matrix(rows), times.to_tensor(-1).numpy()
        batch[part] = {"item_id": ragged_numbers(rows), "ts": times}
    answer = ask(served, "serving_default", sent)
    expected = made.model(batch)["ctr"].to_tensor()
    np.testing.assert_allclose(answer["click_logit"], expected, rtol=1e-4, atol=1e-5)
    there = np.array([[True, False], [True, True]])
    np.testing.assert_allclose(
        answer["click"], np.where(there, tf.sigmoid(expected), 0), rtol=1e-4, atol=1e-5
    )


def check_next_item(made: Made, served: Path) -> None:
    histories = [["item-1", "item-2", "item-3"], ["item-4"]]
    times = tf.ragged.constant([[5, 6, 7], [8]], tf.int64)
    sent = {"item_id": matrix(histories), "ts": times.to_tensor(-1).numpy()}
    answer = ask(served, "serving_default", sent)
    items, scores = made.model.recommend({"item_id": ragged_numbers(histories), "ts": times}, 10)
    np.testing.assert_array_equal(answer["items"], items)
    np.testing.assert_allclose(answer["scores"], scores, rtol=1e-4, atol=1e-5)
    assert set(np.ravel(answer["items"]).tolist()) <= {text.encode() for text in ITEMS}


CHECKS = {
    "ordinary": check_ordinary,
    "meta": check_meta,
    "grm": check_ranker,
    "next_item": check_next_item,
}
