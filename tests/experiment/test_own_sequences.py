"""From a Parquet log of texts to users that a ranker adapts to in stock TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta import io
from gmeta.export.saved_model import export_model
from gmeta.initializers import Constant
from gmeta.layers import FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import GRM, MetaGRM
from support.data_files import prepared_clicks
from support.serving import ask_all

START = Constant(0.1)  # initial rows that take no graph to compute


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    folder = prepared_clicks(tmp_path_factory.mktemp("clicks"), users=40, rows=12, items=30)
    return folder / "train"


def hashed(name):
    return FeatureConfig(name, TableConfig(name, 8, initializer=START), hash=True)


@pytest.mark.slow
def test_clicks_of_a_log_of_texts_are_ranked_and_served(train, tmp_path):
    data = io.sequences(
        train,
        contexts=["city"],
        history=["item_id", "click", "ts"],
        targets=["item_id", "ts"],
        exposed=0.4,
    )
    base = GRM.of(
        [
            hashed("item_id"),
            hashed("city"),
            FeatureConfig("click", TableConfig("click", 4, initializer=START)),
        ],
        contexts=["city"],
        history=["item_id", "click"],
        targets=["item_id"],
        labels={"click": "click"},
        time="ts",
        dim=8,
        blocks=1,
        max_length=40,
        report=None,
    )
    base.compile("adam", metrics=["accuracy"])
    history = base.fit(data, epochs=2, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert 0 < base.evaluate(data, verbose=0, return_dict=True)["accuracy_click"] < 1
    model = MetaGRM(base, inner=InnerLoop(steps=1, learning_rate=0.1, adapt=["heads"]))
    model.compile("adam")
    model.fit(data, verbose=0)
    export_model(model, tmp_path / "1")
    user = {
        "contexts_city": np.array(["city 1"], object),
        "history_item_id": np.array([["item-3", "item-9", ""]], object),
        "history_click": np.array([[1, 0, -1]]),
        "history_ts": np.array([[1_700_000_000, 1_700_000_050, 0]]),
        "targets_item_id": np.array([["item-5", "item-9"]], object),
        "targets_ts": np.array([[1_700_000_100, 1_700_000_200]]),
    }
    clicked = {**user, "labels_click": np.array([[1, 0]], np.float32)}
    before, adapted = ask_all([(tmp_path / "1", "predict", user), (tmp_path / "1", "adapt", clicked)])
    (after,) = ask_all([(tmp_path / "1", "predict_with", {**user, **adapted})])
    batch = {
        "contexts": {"city": tf.constant(["city 1"])},
        "history": {
            "item_id": tf.ragged.constant([["item-3", "item-9"]]),
            "click": tf.ragged.constant([[1, 0]], tf.int64),
            "ts": tf.ragged.constant([[1_700_000_000, 1_700_000_050]], tf.int64),
        },
        "targets": {
            "item_id": tf.ragged.constant([["item-5", "item-9"]]),
            "ts": tf.ragged.constant([[1_700_000_100, 1_700_000_200]], tf.int64),
        },
    }
    np.testing.assert_allclose(before["click_logit"], base(batch)["click"].to_tensor(), rtol=2e-5, atol=2e-6)
    losses = [tf.keras.losses.binary_crossentropy([[1, 0]], answer["click"]) for answer in (before, after)]
    assert float(losses[1]) < float(losses[0])  # it has learned that the first was clicked
