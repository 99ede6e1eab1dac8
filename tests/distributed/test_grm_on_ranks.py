"""A model of exposures on two ranks is that of one rank, however users are dealt out: exposures count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.initializers import Normal
from gmeta.layers import FeatureConfig, TableConfig
from gmeta.models import GRM
from gmeta.optimizers import Adam
from support.drawn_batches import draw_exposures
from support.process_ranks import run_ranks
from support.tables import sorted_records

pytestmark = pytest.mark.ranks

# How many of a step's 5 users are the first rank's, and how many exposures each has: ranks have unlike
# numbers of them, and one has none.
FIRST = (4, 1, 0, 5)
EXPOSURES = ([1, 0, 2, 1, 9], [7, 1, 1, 2, 1], [3, 2, 0, 4, 1], [2, 2, 5, 1, 1])


def own_batches() -> tf.data.Dataset:
    """This rank's part of each step."""
    here = collectives.world()
    steps = [draw_exposures(step, [4, 0, 3, 6, 2], shown) for step, shown in enumerate(EXPOSURES)]

    def made() -> Any:
        for first, users in zip(FIRST, steps, strict=True):
            part = slice(None) if here.size == 1 else (slice(first), slice(first, None))[here.rank]
            yield tf.nest.map_structure(lambda column, part=part: column[part], users)

    spec = tf.nest.map_structure(
        lambda column: (
            tf.RaggedTensorSpec([None, None], column.dtype)
            if isinstance(column, tf.RaggedTensor)
            else tf.TensorSpec([None], column.dtype)
        ),
        steps[0],
    )
    data = tf.data.Dataset.from_generator(made, output_signature=spec)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.apply(tf.data.experimental.assert_cardinality(len(steps))).with_options(options)


def train() -> dict[str, Any]:
    features = [
        FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 0.3)))
        for name in ("item", "action", "city")
    ]
    model = GRM.of(
        features,
        contexts=["city"],
        history=["item", "action"],
        targets=["item"],
        time="time",
        dim=4,
        blocks=1,
        heads=1,
        max_length=6,
        by_time=True,
        expert_units=[4],
        tower_units=[4],
        report=None,
        optimizer=Adam(None),
    )
    # Tracing is what would take the time.
    model.compile(tf.keras.optimizers.Adam(0.01), run_eagerly=True)
    history = model.fit(own_batches(), epochs=2, verbose=0).history
    return {
        "loss": [*history["loss"], *history["ctcvr_loss"]],
        "measured": model.evaluate(own_batches(), verbose=0, return_dict=True),
        "dense": [weight.numpy() for weight in model.trainable_variables],
        "table": sorted_records(model.collection.tables[0]),
    }


# Quick: test_next_item_on_ranks.py for sequences over ranks, and tests/models/sequence/test_grm.py for
# the model.
@pytest.mark.slow
def test_two_ranks_train_and_measure_the_model_of_one() -> None:
    ranks, alone = run_ranks(train, 2), train()
    assert {"auc_ctr", "gauc_ctcvr"} <= set(alone["measured"])
    for rank in ranks:
        np.testing.assert_allclose(rank["loss"], alone["loss"], rtol=1e-5)
        for name, value in alone["measured"].items():
            assert rank["measured"][name] == pytest.approx(value, rel=1e-5), name
        for found, expected in zip(rank["dense"], alone["dense"], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-5)
    keys, rows = (np.concatenate([rank["table"][name] for rank in ranks]) for name in ("keys", "rows"))
    order = np.argsort(keys)
    np.testing.assert_array_equal(keys[order], alone["table"]["keys"])
    np.testing.assert_allclose(rows[order], alone["table"]["rows"], rtol=1e-3, atol=2e-5)
