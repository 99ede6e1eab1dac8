"""The two-tower model of an experiment on retrieval: how it is made, fed and asked for scores."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gmeta.experiment.next_item.counting import Scores
from gmeta.experiment.next_item.histories import Asked, Cuts, Histories, in_batches
from gmeta.experiment.plan.next_item_config import CatalogueConfig
from gmeta.experiment.plan.retrieval_config import TwoTowerMethod
from gmeta.initializers import Normal, Zeros
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import TwoTower
from gmeta.optimizers import AdamW

USER = "user"
_DEVIATION = 0.05
_ASKED = 256  # users at once


def build(config: CatalogueConfig, settings: TwoTowerMethod, seed: int, cuts: Cuts) -> TwoTower:
    """Build and compile the model, at its initial weights."""
    random.seed(seed)  # what Keras' layers take their seeds from
    tf.random.set_seed(seed)
    names = ["item", *([USER] if settings.user_id else []), *(["history"] if settings.history else [])]
    initializer = Normal(0.0, _DEVIATION)
    features = [
        FeatureConfig(name, TableConfig(name, settings.dim, initializer=initializer), hash=name == USER)
        for name in names
    ]
    features.append(FeatureConfig("bias", TableConfig("bias", 1, initializer=Zeros())))
    optimizer = AdamW(settings.learning_rate, weight_decay=settings.weight_decay)
    counts = np.bincount(cuts.train.items, minlength=cuts.items)
    model = TwoTower(
        EmbeddingCollection(features, optimizer=optimizer, seed=seed),
        items=cuts.items,
        history="history" if settings.history else None,
        bias="bias",
        law=settings.law,
        negatives=settings.negatives,
        popularity=None if settings.law == "uniform" else counts,
        hidden=settings.hidden,
        normalize=settings.normalize,
        temperature=settings.temperature,
        item_dropout=settings.item_dropout,
        dropout=settings.dropout,
        seed=seed,
        ks=config.ks,
    )
    model.compile(tf.keras.optimizers.Adam(settings.learning_rate))
    return model


def training_batches(train: Histories, settings: TwoTowerMethod, seed: int, epoch: int) -> tf.data.Dataset:
    """Return batches of users, in another order in each epoch: that of ``epoch``, then the next ones."""
    assert settings.users_per_batch is not None
    # Of one item, a history has nothing left when the item is asked for; the user's id can still learn it.
    some = train.choose(train.sizes > (0 if settings.user_id else 1))
    return in_batches(_columns(some), settings.users_per_batch, seed, epoch)


def validation_batches(asked: Asked) -> tf.data.Dataset:
    """Return batches of histories, with the items that are asked for as labels."""
    targets = asked.targets.keep(asked.targets.items >= 0)
    some = targets.sizes > 0
    labels = _columns(targets.choose(some))["item"]
    return tf.data.Dataset.from_tensor_slices((_columns(asked.histories.choose(some)), labels)).batch(_ASKED)


def _columns(histories: Histories) -> dict[str, tf.Tensor]:
    items = tf.RaggedTensor.from_row_splits(tf.constant(histories.items, tf.int64), histories.row_splits)
    return {USER: tf.constant(histories.users, tf.int64), "item": items}


@dataclass(frozen=True)
class TowerScorer:
    """A trained model as a `gmeta.experiment.next_item.counting.Scorer`."""

    model: TwoTower

    def scores(self, histories: Histories) -> Scores:
        """Compute the products of users' and items' vectors, (users, items)."""
        vectors = self.model.item_vectors()
        found = [
            tf.matmul(self.model(_columns(part), training=False), vectors, transpose_b=True).numpy()
            for begin in range(0, len(histories), _ASKED)
            for part in [histories.choose(slice(begin, begin + _ASKED))]
        ]
        return np.concatenate(found).astype(np.float32)
