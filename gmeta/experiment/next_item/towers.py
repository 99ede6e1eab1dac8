"""The two-tower model of an experiment on retrieval: how it is built, fed and scored."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.next_item.counting import Scores
from gmeta.experiment.next_item.histories import Asked, Cuts, Histories, in_batches
from gmeta.experiment.next_item.side_columns import SideColumns, as_tensor
from gmeta.experiment.plan.next_item_config import CatalogueConfig
from gmeta.experiment.plan.retrieval_config import TwoTowerMethod
from gmeta.initializers import Normal, Zeros
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import TwoTower
from gmeta.optimizers import AdamW

USER, OF_USER, OF_ITEM = "user", "of_user", "of_item"
"""The features of a user's id, and of the columns of users and of items."""
_DEVIATION = 0.05
_ASKED = 256  # users at once


def build(config: CatalogueConfig, settings: TwoTowerMethod, seed: int, cuts: Cuts) -> TwoTower:
    """Build and compile the model, at its initial weights."""
    random.seed(seed)  # Keras' layers take their seeds from it
    tf.random.set_seed(seed)
    names = ["item", *([USER] if settings.user_id else []), *(["history"] if settings.history else [])]
    initializer = Normal(0.0, _DEVIATION)
    features = [
        FeatureConfig(name, TableConfig(name, settings.dim, initializer=initializer), hash=name == USER)
        for name in names
    ]
    feed, item_columns = Feed.of(settings, cuts), {}
    of_items = feed.of_items(cuts.ids)
    if of_items is not None:
        item_columns[OF_ITEM] = of_items
    for name in (*([OF_USER] if feed.users else []), *item_columns):
        table = TableConfig(name, settings.dim, initializer=initializer)
        features.append(FeatureConfig(name, table, combiner="sum"))
    features.append(FeatureConfig("bias", TableConfig("bias", 1, initializer=Zeros())))
    optimizer = AdamW(settings.learning_rate, weight_decay=settings.weight_decay)
    counts = np.bincount(cuts.train.items, minlength=cuts.items)
    model = TwoTower(
        EmbeddingCollection(features, optimizer=optimizer, seed=seed),
        items=cuts.items,
        history="history" if settings.history else None,
        item_columns=item_columns,
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


@dataclass(frozen=True)
class Feed:
    """The inputs of models: ids, histories, and the columns that a method reads.

    Attributes:
      columns: The columns of users and of items; None: the method reads none.
      users: The columns of users that it reads.
      items: The columns of items that it reads.
    """

    columns: SideColumns | None = None
    users: Sequence[str] = ()
    items: Sequence[str] = ()

    @classmethod
    def of(cls, settings: TwoTowerMethod, cuts: Cuts) -> Feed:
        """Return the feed for the models of a method."""
        columns = cuts.columns
        return cls() if columns is None else cls(columns, *columns.names(settings.columns))

    def of_users(self, users: Ints) -> tf.RaggedTensor | None:
        """Return the numbers of users' values, none for an unknown user; None if no column is read."""
        if self.columns is None or not self.users:
            return None
        return as_tensor(self.columns.users.choose(self.users, users))

    def of_items(self, items: Ints) -> tf.RaggedTensor | None:
        """Return the numbers of items' values; None if no column is read."""
        if self.columns is None or not self.items:
            return None
        return as_tensor(self.columns.items.choose(self.items, items))

    def __call__(self, histories: Histories) -> dict[str, tf.Tensor]:
        """Return the columns of a batch."""
        items = tf.RaggedTensor.from_row_splits(tf.constant(histories.items, tf.int64), histories.row_splits)
        own = self.of_users(histories.users)
        known = {} if own is None else {OF_USER: own}
        return {USER: tf.constant(histories.users, tf.int64), "item": items, **known}

    def training_batches(
        self, train: Histories, settings: TwoTowerMethod, seed: int, epoch: int
    ) -> tf.data.Dataset:
        """Return batches of users, in a new order in each epoch, from ``epoch`` on."""
        assert settings.users_per_batch is not None
        # A history of one item is empty when that item is the target; the user's id and columns can still
        # learn from it.
        some = train.choose(train.sizes > (0 if settings.user_id or self.users else 1))
        return in_batches(self(some), settings.users_per_batch, seed, epoch)

    def validation_batches(self, asked: Asked) -> tf.data.Dataset:
        """Return batches of histories, with the target items as labels."""
        targets = asked.targets.keep(asked.targets.items >= 0)
        some = targets.sizes > 0
        labels = self(targets.choose(some))["item"]
        return tf.data.Dataset.from_tensor_slices((self(asked.histories.choose(some)), labels)).batch(_ASKED)


@dataclass(frozen=True)
class TowerScorer:
    """A trained model and its feed as a `gmeta.experiment.next_item.counting.Scorer`."""

    model: TwoTower
    feed: Feed

    def scores(self, histories: Histories) -> Scores:
        """Compute the products of users' and items' vectors, (users, items)."""
        vectors = self.model.item_vectors()
        found = [
            tf.matmul(self.model(self.feed(part), training=False), vectors, transpose_b=True).numpy()
            for begin in range(0, len(histories), _ASKED)
            for part in [histories.choose(slice(begin, begin + _ASKED))]
        ]
        return np.concatenate(found).astype(np.float32)
