"""A generative retriever on two ranks is that of one rank on the same global batches of users."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import FlatRetriever, GenerativeRetriever
from gmeta.optimizers import Adam
from gmeta.preprocess import semantic_ids
from support.process_ranks import run_ranks
from support.tables import sorted_records

pytestmark = pytest.mark.ranks

ITEMS, LONGEST, STEPS = 30, 6, 4
FIRST = (6, 0, 7, 3)  # how many of a step's 7 users are the first rank's


def users(step: int) -> tf.RaggedTensor:
    """A step's users, of all ranks: histories from none to longer than the model reads."""
    random = np.random.default_rng([3, step])
    lengths = random.integers(0, LONGEST + 4, 7)
    lengths[:2] = LONGEST, 0
    items = tf.constant(random.integers(0, ITEMS, lengths.sum()))
    return tf.RaggedTensor.from_row_lengths(items, lengths)


def own_batches() -> tf.data.Dataset:
    """This rank's part of each step."""
    here = collectives.world()

    def made() -> Any:
        for step, first in enumerate(FIRST):
            part = slice(None) if here.size == 1 else (slice(first), slice(first, None))[here.rank]
            yield {"item": users(step)[part]}

    spec = {"item": tf.RaggedTensorSpec([None, None], tf.int64)}
    data = tf.data.Dataset.from_generator(made, output_signature=spec)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.apply(tf.data.experimental.assert_cardinality(STEPS)).with_options(options)


def train() -> dict[str, Any]:
    # Rows are a function of their ids wherever they are; of dense weights all get the first rank's.
    seed = collectives.world().rank
    hstu = HSTU(
        blocks=1,
        heads=1,
        attention_dim=4,
        value_dim=4,
        max_length=LONGEST,
        bias_by_time=False,
        seed=seed,
    )
    table = TableConfig("item", 4, initializer=Normal(0.0, 0.3))
    collection = EmbeddingCollection([FeatureConfig("item", table)], optimizer=Adam(None))
    ids = semantic_ids(np.random.default_rng(0).normal(size=(ITEMS, 3)), levels=2, codes=3)
    model = GenerativeRetriever(
        collection, hstu, ids, max_length=LONGEST, width=4, negatives=8, beam=10, ks=[5]
    )
    model.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=True)
    history = model.fit(own_batches(), epochs=2, verbose=0).history
    return {
        "loss": history["loss"],
        "code_loss": history["code_loss"],
        "measured": model.evaluate(own_batches(), verbose=0, return_dict=True),
        "dense": [weight.numpy() for weight in model.trainable_variables],
        "table": sorted_records(collection.tables[0]),
    }


def train_flat() -> dict[str, Any]:
    seed = collectives.world().rank
    hstu = HSTU(blocks=1, heads=1, attention_dim=4, value_dim=4, max_length=20, bias_by_time=False, seed=seed)
    ids = semantic_ids(np.random.default_rng(0).normal(size=(ITEMS, 3)), levels=2, codes=3)
    model = FlatRetriever(hstu, ids, dim=4, max_length=LONGEST, beam=10, ks=[5], seed=seed)
    model.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=True)
    history = model.fit(own_batches(), epochs=2, verbose=0).history
    return {
        "loss": history["loss"],
        **model.evaluate(own_batches(), verbose=0, return_dict=True),
        "dense": [weight.numpy() for weight in model.trainable_variables],
    }


# Quick: test_next_item_on_ranks.py for a catalogue on ranks, and test_policies_on_ranks.py for what is
# drawn.
@pytest.mark.slow
def test_two_ranks_train_and_measure_the_flat_form_of_one() -> None:
    ranks, alone = run_ranks(train_flat, 2), train_flat()
    dense = alone.pop("dense")
    assert alone["loss"][1] < alone["loss"][0]
    for rank in ranks:
        for found, expected in zip(rank.pop("dense"), dense, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        for name, value in alone.items():
            np.testing.assert_allclose(rank[name], value, rtol=1e-5, err_msg=name)


# Quick: test_next_item_on_ranks.py for lookups of a catalogue on ranks, and test_policies_on_ranks.py.
@pytest.mark.slow
def test_two_ranks_train_and_measure_the_retriever_of_one() -> None:
    ranks, alone = run_ranks(train, 2), train()
    assert alone["loss"][1] < alone["loss"][0]
    for rank in ranks:
        for name in ("loss", "code_loss"):
            np.testing.assert_allclose(rank[name], alone[name], rtol=1e-5)
        for name, value in alone["measured"].items():
            assert rank["measured"][name] == pytest.approx(value, rel=1e-6), name
        for found, expected in zip(rank["dense"], alone["dense"], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    keys, rows = (np.concatenate([rank["table"][name] for rank in ranks]) for name in ("keys", "rows"))
    order = np.argsort(keys)
    np.testing.assert_array_equal(keys[order], alone["table"]["keys"])
    np.testing.assert_allclose(rows[order], alone["table"]["rows"], rtol=1e-4, atol=1e-5)
