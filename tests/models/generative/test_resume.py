"""A generative retriever that is resumed from a sharded checkpoint goes on as if it had not been ended."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.checkpoint import ShardedCheckpoint
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig
from gmeta.models import GenerativeRetriever
from gmeta.optimizers import Adam
from gmeta.preprocess import semantic_ids

ITEMS = 30


def make_model():
    random = np.random.default_rng(0)
    backbone = HSTU(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=6, bias_by_time=False)
    collection = EmbeddingCollection([FeatureConfig("item", dim=8)], optimizer=Adam(0.01))
    ids = semantic_ids(random.normal(size=(ITEMS, 3)), levels=2, codes=3)
    model = GenerativeRetriever(collection, backbone, ids, max_length=6, width=8, negatives=8)
    model.compile(tf.keras.optimizers.Adam(0.01))
    return model


# Quick: tests/reinforcement/test_policy_training.py, test_a_resumed_run_is_the_uninterrupted_one[3].
@pytest.mark.slow
def test_resumed_is_as_uninterrupted(tmp_path):
    items = tf.random.stateless_uniform([24, 5], [1, 2], 0, ITEMS, tf.int64)
    data = tf.data.Dataset.from_tensor_slices({"item": tf.RaggedTensor.from_tensor(items)}).batch(8)
    whole = make_model()
    losses = whole.fit(data, epochs=4, verbose=0).history["loss"]
    ShardedCheckpoint(tmp_path / "saved").fit(make_model(), data, epochs=2, verbose=0)
    resumed = make_model()
    found = ShardedCheckpoint(tmp_path / "saved").fit(resumed, data, epochs=4, verbose=0).history["loss"]
    np.testing.assert_allclose(found, losses[2:], rtol=1e-5)
    for own, expected in zip(resumed.weights, whole.weights, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)
