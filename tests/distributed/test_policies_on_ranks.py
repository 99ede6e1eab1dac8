"""Policy training on two ranks is that of one rank on the same global batches of users."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.reinforcement import ECPO, PolicyTraining, Rollouts
from gmeta.reinforcement.rewards import RankAwareReward
from support.process_ranks import run_ranks
from support.softmax_policy import SoftmaxPolicy

pytestmark = pytest.mark.ranks

STEPS = 4
FIRST = (6, 0, 7, 3)  # how many of a step's 7 users are the first rank's


def own_batches() -> tf.data.Dataset:
    """This rank's part of each step."""
    here = collectives.world()

    def made() -> Any:
        for step, first in enumerate(FIRST):
            part = slice(None) if here.size == 1 else (slice(first), slice(first, None))[here.rank]
            users = (np.arange(7) * 3 + step)[part]
            yield {"user": users, "next": users * 5 % 9}

    spec = {name: tf.TensorSpec([None], tf.int64) for name in ("user", "next")}
    data = tf.data.Dataset.from_generator(made, output_signature=spec)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.apply(tf.data.experimental.assert_cardinality(STEPS)).with_options(options)


def train(eager: bool = True) -> dict[str, Any]:
    # Rows are a function of their ids wherever they are; of dense weights all get the first rank's.
    table = TableConfig("user", 8, initializer=Normal(0.0, 1.0))
    policy = SoftmaxPolicy(EmbeddingCollection([FeatureConfig("user", table)]), seed=collectives.world().rank)
    training = PolicyTraining(
        policy,
        RankAwareReward(),
        objective=ECPO(kl=0.1),
        rollouts=Rollouts(group=4, sampling="without_replacement"),
        updates=2,
        sft=0.3,
        user="user",
        k=2,
    )
    training.compile(tf.keras.optimizers.Adam(0.03), run_eagerly=eager)
    history = training.fit(own_batches(), epochs=2, verbose=0).history
    return {
        "history": history,
        "measured": training.evaluate(own_batches(), verbose=0, return_dict=True),
        "weights": [weight.numpy() for weight in training.weights],
    }


# Quick: graph.
@pytest.mark.parametrize("eager", [pytest.param(True, marks=pytest.mark.slow), False], ids=["eager", "graph"])
@pytest.mark.shown_by(
    "distributed/test_next_item_on_ranks.py::test_two_ranks_train_and_measure_the_model_of_one"
)
def test_two_ranks_train_and_measure_the_policy_of_one(eager: bool) -> None:
    ranks, alone = run_ranks(train, 2, eager), train(eager)
    assert alone["history"]["sft_loss"][1] < alone["history"]["sft_loss"][0]
    for rank in ranks:
        assert set(rank["history"]) == set(alone["history"])
        for name, values in alone["history"].items():
            np.testing.assert_allclose(rank["history"][name], values, rtol=1e-5, atol=1e-6, err_msg=name)
        assert rank["measured"]["reward@2"] == pytest.approx(alone["measured"]["reward@2"], rel=1e-6)
        assert len(rank["weights"]) == len(alone["weights"])
        for found, expected in zip(rank["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
