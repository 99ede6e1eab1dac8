"""The models of an experiment that ranks a catalogue: how they are built, fed, trained and scored.

`generative` has the parts for generative models; this module has those for two-tower models and for models
over sequences, and for all models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.semantic_ids import SemanticIds
from gmeta.experiment.baselines.task_rows import Ints
from gmeta.experiment.next_item import generative
from gmeta.experiment.next_item.counting import Scorer, Scores
from gmeta.experiment.next_item.histories import Asked, Cuts, Histories, in_batches
from gmeta.experiment.next_item.side_columns import SideColumns, as_tensor
from gmeta.experiment.plan.generative_config import TIMED, GenerativeMethod
from gmeta.experiment.plan.next_item_config import CatalogueConfig, NextItemMethod, TwoTowerMethod
from gmeta.experiment.runs import best_epoch
from gmeta.initializers import Normal, Zeros
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, FuXi, TableConfig
from gmeta.losses import SampledSoftmax
from gmeta.models import NextItemModel, TwoTower
from gmeta.models.zoo.softmax_blocks import LiGR, SASRec
from gmeta.optimizers import AdamW, Warmup

USER, OF_USER, OF_ITEM = "user", "of_user", "of_item"
"""The features of a user's id, and of the columns of users and of items."""
_TOWER_DEVIATION = 0.05  # of initial rows
_ASKED = 256  # users at once


def _build_two_tower(config: CatalogueConfig, settings: TwoTowerMethod, seed: int, cuts: Cuts) -> TwoTower:
    random.seed(seed)  # Keras' layers take their seeds from it
    tf.random.set_seed(seed)
    names = ["item", *([USER] if settings.user_id else []), *(["history"] if settings.history else [])]
    initializer = Normal(0.0, _TOWER_DEVIATION)
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
    """The inputs of two-tower models: ids, histories, and the columns that a method reads.

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
    """A trained two-tower model and its feed as a `gmeta.experiment.next_item.counting.Scorer`."""

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


_BACKBONES: Mapping[str, Callable[..., Any]] = {"sasrec": SASRec, "esasrec": LiGR, "hstu": HSTU, "fuxi": FuXi}


def build(config: CatalogueConfig, method: str, seed: int, cuts: Cuts, ids: SemanticIds | None = None) -> Any:
    """Build and compile the model of a method, at its initial weights.

    Args:
      config: The experiment.
      method: One of its methods.
      seed: The seed of weights.
      cuts: The data.
      ids: The semantic ids of a generative method; None: they are made.
    """
    s = config.methods[method]
    if isinstance(s, TwoTowerMethod):
        model: Any = _build_two_tower(config, s, seed, cuts)
    elif isinstance(s, GenerativeMethod):
        timed = s.reads_times and cuts.train.times is not None
        if ids is None:
            ids = generative.make_ids(s, seed, cuts, lambda: _item_vectors(config, s, seed, cuts))
        model = generative.build(config, s, seed, cuts, ids, _backbone, timed)
    else:
        model = _build_sequential(config, s, seed, cuts)
    model.leave_out_seen = config.SETS or not config.seen
    # A checkpoint restores the optimizer's moments into existing variables, so they must be built now.
    model.optimizer.build(model.trainable_variables)
    return model


def _build_sequential(config: CatalogueConfig, s: NextItemMethod, seed: int, cuts: Cuts) -> NextItemModel:
    random.seed(seed)  # Keras' layers take their seeds from it
    tf.random.set_seed(seed)
    timed = s.reads_times and cuts.train.times is not None
    deviation = (2 / (cuts.items + s.dim)) ** 0.5 if s.initial_deviation is None else s.initial_deviation
    rate: Any = s.learning_rate
    if s.warm_up:  # step i of n uses the share i / n of the rate
        rate = Warmup(rate, max(s.warm_up - 1, 1), start=1 / s.warm_up)
    collection = EmbeddingCollection(
        [FeatureConfig("item", TableConfig("item", s.dim, initializer=Normal(0.0, deviation)))],
        optimizer=AdamW(rate, beta_2=s.beta_2, weight_decay=s.weight_decay),
        seed=seed,
    )
    assert s.max_length is not None  # `NextItemMethod.complete` sets it
    model = NextItemModel(
        collection,
        _backbone(s.model, s, s.max_length, timed, seed, s.horizon),
        items=cuts.items,
        max_length=s.max_length,
        time="time" if timed else None,
        negatives=s.negatives,
        negatives_per=s.negatives_per,
        repeats=s.repeats,
        popularity=np.bincount(cuts.train.items, minlength=cuts.items) if s.log_q else None,
        loss=SampledSoftmax(s.temperature, s.normalize, s.in_batch),
        token_scale=s.token_scale,
        places=s.places,
        norm=s.norm,
        dropout=s.dropout,
        seed=seed,
        ks=config.ks,
    )
    model.compile(tf.keras.optimizers.Adam(rate, beta_2=s.beta_2))
    return model


def _backbone(
    kind: str,
    s: NextItemMethod | GenerativeMethod,
    tokens: int,
    timed: bool,
    seed: int,
    horizon: float | None = None,
) -> Any:
    """Make a backbone that reads sequences of a given number of tokens."""
    return _BACKBONES[kind](
        blocks=s.blocks,
        heads=s.heads,
        attention_dim=s.dim // s.heads,
        value_dim=s.dim // s.heads,
        max_length=tokens,
        dropout=s.dropout,
        seed=seed,
        **({"bias_by_time": False} if kind in TIMED and not timed else {}),
        **({} if horizon is None else {"horizon": horizon}),
    )


def _item_vectors(config: CatalogueConfig, s: GenerativeMethod, seed: int, cuts: Cuts) -> Any:
    """Train SASRec for some epochs on the training part, and return its vectors of items."""
    assert s.item_epochs is not None
    own = NextItemMethod(
        "SASRec", dim=s.dim, max_length=s.max_length, users_per_batch=s.users_per_batch, dropout=s.dropout
    )
    model = _build_sequential(config, own, seed, cuts)
    model.fit(training_batches(cuts.train, own, seed, 0), epochs=s.item_epochs, verbose=0)
    return model.item_vectors().numpy()


def train(
    config: CatalogueConfig,
    method: str,
    seed: int,
    *,
    cuts: Cuts,
    folder: Path,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
) -> int:
    """Train a method until validation no longer improves, or resume its training.

    All ranks of a job call it together, and divide a step's ``users_per_batch`` users. So the number of ranks
    doesn't change the steps, nor the result, apart from rounding and from dropout and negatives, which each
    rank draws itself. A job may resume training that a different number of ranks began.

    Returns:
      How many epochs earlier calls had done.
    """
    s = config.methods[method]
    if isinstance(s, GenerativeMethod):
        generative.keep_ids(s, seed, cuts, folder, lambda: _item_vectors(config, s, seed, cuts))
    model = build(config, method, seed, cuts, _kept_ids(s, seed, cuts, folder))
    training, validation = _batches(config, method, seed, cuts)
    return best_epoch.train(model, folder, _stopping(config, method), training, validation, callbacks)


def measure_epochs(
    config: CatalogueConfig,
    method: str,
    seed: int,
    *,
    cuts: Cuts,
    report: Callable[[int, float], None],
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
) -> float:
    """Train a method as `train` does, but save nothing, and return the best epoch's NDCG in validation.

    Args:
      config: The experiment.
      method: One of its methods.
      seed: The seed of weights and of the order of users.
      cuts: The data.
      report: As in `gmeta.experiment.runs.best_epoch.measure`.
      callbacks: Keras callbacks.
    """
    model = build(config, method, seed, cuts)
    training, validation = _batches(config, method, seed, cuts)
    return best_epoch.measure(model, _stopping(config, method), training, validation, report, callbacks)


def load_best(config: CatalogueConfig, method: str, seed: int, *, cuts: Cuts, folder: Path) -> Scorer:
    """Load the best epoch of a method as a scorer.

    Raises:
      DataError: The method isn't fully trained.
    """
    s = config.methods[method]
    model = best_epoch.load_best(
        lambda: build(config, method, seed, cuts, _kept_ids(s, seed, cuts, folder)),
        folder,
        _stopping(config, method),
        f"{method}, seed {seed}",
    )
    if isinstance(s, GenerativeMethod):
        return generative.SearchScorer(model)
    of_towers = isinstance(s, TwoTowerMethod)
    return TowerScorer(model, Feed.of(s, cuts)) if of_towers else ModelScorer(model)


def _kept_ids(s: Any, seed: int, cuts: Cuts, folder: Path) -> SemanticIds | None:
    return generative.read_ids(s, seed, cuts, folder) if isinstance(s, GenerativeMethod) else None


def _stopping(config: CatalogueConfig, method: str) -> best_epoch.Stopping:
    settings = config.methods[method]
    return best_epoch.Stopping(f"val_ndcg@{config.ks[0]}", True, settings.epochs, settings.patience)


def _batches(
    config: CatalogueConfig, method: str, seed: int, cuts: Cuts
) -> tuple[best_epoch.Batches, tf.data.Dataset]:
    """Return the function that makes batches for training, and the batches of validation."""
    settings: Any = config.methods[method]
    own: Sequence[Callable[..., tf.data.Dataset]] = (training_batches, validation_batches)
    if isinstance(settings, TwoTowerMethod):
        feed = Feed.of(settings, cuts)
        own = (feed.training_batches, feed.validation_batches)
    training, validation = own
    return lambda epoch: training(cuts.train, settings, seed, epoch), validation(cuts.validation)


def training_batches(
    train: Histories, settings: NextItemMethod | GenerativeMethod, seed: int, epoch: int
) -> tf.data.Dataset:
    """Return batches of users, in a new order in each epoch, from ``epoch`` on."""
    assert settings.users_per_batch is not None
    # A token without a successor gives no training signal.
    return in_batches(train.choose(train.sizes > 1).ragged(), settings.users_per_batch, seed, epoch)


def validation_batches(asked: Asked) -> tf.data.Dataset:
    """Return batches of histories, with the target items of the catalogue as labels.

    A label has no time, so models read the same inputs as in serving.
    """
    targets = asked.targets.keep(asked.targets.items >= 0)
    some = (targets.sizes > 0) & (asked.histories.sizes > 0)
    labels = targets.choose(some).ragged()["item"]
    return tf.data.Dataset.from_tensor_slices((asked.histories.choose(some).ragged(), labels)).batch(_ASKED)


@dataclass(frozen=True)
class ModelScorer:
    """A trained model over sequences as a `gmeta.experiment.next_item.counting.Scorer`."""

    model: NextItemModel

    def scores(self, histories: Histories) -> Scores:
        """Compute the logits of all items, (users, items)."""
        ragged = histories.ragged()
        vectors = self.model.item_vectors() / self.model.loss_of.temperature
        found = []
        for begin in range(0, len(histories), _ASKED):
            part = {name: column[begin : begin + _ASKED] for name, column in ragged.items()}
            found.append(tf.matmul(self.model(part, training=False), vectors, transpose_b=True).numpy())
        scores = np.concatenate(found).astype(np.float32)
        scores[histories.owner, histories.items] += float(self.model.repeat_bias)
        return scores
