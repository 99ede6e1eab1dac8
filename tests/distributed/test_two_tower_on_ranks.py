"""A two-tower model on two ranks is that of one rank on the same global batches of users."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import TwoTower
from gmeta.optimizers import Adam
from support.process_ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]  # Quick: test_next_item_on_ranks, of the same base class

ITEMS, STEPS, USERS = 20, 4, 6
FIRST = (5, 0, 2, 6)
"""How many of a step's users are the first rank's: almost all, none, some, all."""


def own_batches() -> tf.data.Dataset:
    """This rank's part of each step: histories, and the items that are right."""
    here = collectives.world()

    def made() -> Any:
        for step in range(STEPS):
            random = np.random.default_rng([5, step])
            lengths, asked = random.integers(1, 6, USERS), random.integers(1, 4, USERS)
            columns = {
                "user": tf.constant(random.integers(0, 99, USERS), tf.int64),
                "item": tf.RaggedTensor.from_row_lengths(random.integers(0, ITEMS, lengths.sum()), lengths),
            }
            right = tf.RaggedTensor.from_row_lengths(random.integers(0, ITEMS, asked.sum()), asked)
            first = FIRST[step]
            part = slice(None) if here.size == 1 else (slice(first), slice(first, None))[here.rank]
            yield {name: column[part] for name, column in columns.items()}, right[part]

    ragged = tf.RaggedTensorSpec([None, None], tf.int64)
    spec = {"user": tf.TensorSpec([None], tf.int64), "item": ragged}, ragged
    data = tf.data.Dataset.from_generator(made, output_signature=spec)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.apply(tf.data.experimental.assert_cardinality(STEPS)).with_options(options)


def train() -> dict[str, Any]:
    features = [
        FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 0.3)))
        for name in ("user", "item", "history")
    ]
    model = TwoTower(
        EmbeddingCollection(features, optimizer=Adam(0.01)),
        items=ITEMS,
        history="history",
        item_dropout=0.0,  # what is dropped depends on the place in a rank's batch
        ks=[5],
    )
    model.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=True)
    losses = model.fit(own_batches(), epochs=2, verbose=0).history["loss"]
    measured = model.evaluate(own_batches(), verbose=0, return_dict=True)
    return {"loss": losses, "measured": measured, "items": model.item_vectors().numpy()}


def test_two_ranks_train_and_measure_the_model_of_one() -> None:
    ranks, alone = run_ranks(train, 2), train()
    assert alone["loss"][1] < alone["loss"][0]
    for rank in ranks:
        np.testing.assert_allclose(rank["loss"], alone["loss"], rtol=1e-5)
        for name, value in alone["measured"].items():
            assert rank["measured"][name] == pytest.approx(value, rel=1e-6), name
        np.testing.assert_allclose(rank["items"], alone["items"], rtol=1e-4, atol=1e-5)
