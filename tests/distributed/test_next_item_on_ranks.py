"""A model of the next item on two ranks is that of one rank on the same global batches of users."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import NextItemModel
from gmeta.optimizers import Adam
from support.process_ranks import run_ranks
from support.tables import sorted_records

pytestmark = pytest.mark.ranks

ITEMS, LONGEST, STEPS = 30, 6, 4
# How many of a step's 7 users are the first rank's: all but one, none, all, and some.
FIRST = (6, 0, 7, 3)


def users(step: int) -> dict[str, tf.RaggedTensor]:
    """A step's users, of all ranks: histories from none to longer than the model reads."""
    random = np.random.default_rng([3, step])
    lengths = random.integers(0, LONGEST + 4, 7)
    lengths[:2] = LONGEST, 0
    items = random.integers(0, ITEMS, lengths.sum())
    times = np.cumsum(random.integers(1, 999, lengths.sum()))
    return {
        name: tf.RaggedTensor.from_row_lengths(tf.constant(column, tf.int64), lengths)
        for name, column in (("item", items), ("time", times))
    }


def own_batches() -> tf.data.Dataset:
    """This rank's part of each step."""
    here = collectives.world()

    def made() -> Any:
        for step in range(STEPS):
            first = FIRST[step]
            part = slice(None) if here.size == 1 else (slice(first), slice(first, None))[here.rank]
            yield {name: column[part] for name, column in users(step).items()}

    spec = tf.RaggedTensorSpec([None, None], tf.int64)
    data = tf.data.Dataset.from_generator(made, output_signature={"item": spec, "time": spec})
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.apply(tf.data.experimental.assert_cardinality(STEPS)).with_options(options)


def train() -> dict[str, Any]:
    # Rows are a function of their ids wherever they are; of the backbone all get the first rank's weights.
    seed = collectives.world().rank
    hstu = HSTU(blocks=1, heads=1, attention_dim=4, value_dim=4, max_length=LONGEST, seed=seed)
    collection = EmbeddingCollection(
        [FeatureConfig("item", TableConfig("item", 4, initializer=Normal(0.0, 0.3)))], optimizer=Adam(None)
    )
    model = NextItemModel(collection, hstu, items=ITEMS, max_length=LONGEST, time="time", negatives=8, ks=[5])
    # Tracing is what would take the time.
    model.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=True)
    history = model.fit(own_batches(), epochs=2, verbose=0).history
    return {
        "loss": history["loss"],
        "measured": model.evaluate(own_batches(), verbose=0, return_dict=True),
        "dense": [weight.numpy() for weight in model.trainable_variables],
        "table": sorted_records(collection.tables[0]),
    }


def test_two_ranks_train_and_measure_the_model_of_one() -> None:
    ranks, alone = run_ranks(train, 2), train()
    assert alone["loss"][1] < alone["loss"][0]
    for rank in ranks:
        np.testing.assert_allclose(rank["loss"], alone["loss"], rtol=1e-5)
        for name, value in alone["measured"].items():
            assert rank["measured"][name] == pytest.approx(value, rel=1e-6), name
        for found, expected in zip(rank["dense"], alone["dense"], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    keys, rows = (np.concatenate([rank["table"][name] for rank in ranks]) for name in ("keys", "rows"))
    order = np.argsort(keys)
    np.testing.assert_array_equal(keys[order], alone["table"]["keys"])
    np.testing.assert_allclose(rows[order], alone["table"]["rows"], rtol=1e-4, atol=1e-5)
