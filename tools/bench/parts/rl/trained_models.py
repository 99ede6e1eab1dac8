"""The models of the experiment: the policy that imitates histories, and the model of the log's clicks."""

from __future__ import annotations

from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import GRM, GenerativeRetriever
from gmeta.optimizers import Adam

import tensorflow as tf
from parts.rl.simulated_users import SimulatedUsers

DIM = 32


def imitate(users: SimulatedUsers, *, epochs: int, seed: int) -> GenerativeRetriever:
    """Train a policy on the histories: the items that a log's users chose next by themselves."""
    table = TableConfig("item", DIM, initializer=Normal(0.0, DIM**-0.5))
    policy = GenerativeRetriever(
        EmbeddingCollection([FeatureConfig("item", table)], optimizer=Adam(None), seed=seed),
        HSTU(
            blocks=1,
            heads=2,
            attention_dim=DIM // 2,
            value_dim=DIM // 2,
            max_length=users.events,
            bias_by_time=False,
            seed=seed,
        ),
        users.ids,
        max_length=users.events,
        width=DIM,
        repeats=False,
        seed=seed,
        ks=(10,),
    )
    policy.compile(tf.keras.optimizers.Adam(3e-3))
    policy.fit(users.histories(users.past, shuffle=seed), epochs=epochs, verbose=0)
    return policy


def learn_clicks(users: SimulatedUsers, *, epochs: int, seed: int) -> GRM:
    """Train a model of clicks on the log's exposures, never on the true probabilities."""
    features = [
        FeatureConfig(name, TableConfig(name, width, initializer=Normal(0.0, 0.1)))
        for name, width in (("item", 16), ("category", 16), ("action", 4))
    ]
    model = GRM.of(
        features,
        contexts=[],
        history=["item", "category", "action"],
        targets=["item", "category"],
        labels={"ctr": "click"},
        time="time",
        dim=DIM,
        blocks=1,
        experts=2,
        expert_units=(DIM,),
        max_length=users.events,
        by_time=True,
        dropout=0.1,
        optimizer=Adam(None),
        seed=seed,
    )
    model.compile(tf.keras.optimizers.Adam(3e-3))
    model.fit(users.exposures(users.past, shuffle=seed), epochs=epochs, verbose=0)
    return model
