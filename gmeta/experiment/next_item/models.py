"""The models of an experiment that ranks a catalogue: how they are made, trained and asked for scores.

`towers` has what is particular to two-tower models; the rest is of models over sequences, and of both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.checkpoint.callback import tables_by_name
from gmeta.checkpoint.dense_weights import read_dense, write_dense
from gmeta.checkpoint.store import CheckpointStore, step_of
from gmeta.core.errors import DataError
from gmeta.experiment.next_item import towers
from gmeta.experiment.next_item.counting import Scorer, Scores
from gmeta.experiment.next_item.histories import Asked, Cuts, Histories, in_batches
from gmeta.experiment.plan.next_item_config import CatalogueConfig, NextItemMethod
from gmeta.experiment.plan.retrieval_config import TwoTowerMethod
from gmeta.experiment.runs.trainer import EpochCheckpoints, read_logged
from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, FuXi, TableConfig
from gmeta.models import NextItemModel
from gmeta.models.zoo.softmax_blocks import LiGR, SASRec
from gmeta.optimizers import AdamW

_BETA_2 = 0.98
_ASKED = 256  # users at once
_BACKBONES: Mapping[str, Callable[..., Any]] = {"sasrec": SASRec, "esasrec": LiGR, "hstu": HSTU, "fuxi": FuXi}
_TIMED = ("hstu", "fuxi")
_BEST = "best"


def build(config: CatalogueConfig, method: str, seed: int, cuts: Cuts) -> Any:
    """Build and compile the model of a method, at its initial weights."""
    s = config.methods[method]
    model = (
        towers.build(config, s, seed, cuts)
        if isinstance(s, TwoTowerMethod)
        else _build(config, s, seed, cuts)
    )
    # A checkpoint restores the optimizer's moments into existing variables, so they have to be built now.
    model.optimizer.build(model.trainable_variables)
    return model


def _build(config: CatalogueConfig, s: NextItemMethod, seed: int, cuts: Cuts) -> NextItemModel:
    random.seed(seed)  # what Keras' layers take their seeds from
    tf.random.set_seed(seed)
    timed = s.model in _TIMED and cuts.train.times is not None
    deviation = (2 / (cuts.items + s.dim)) ** 0.5  # Xavier's
    collection = EmbeddingCollection(
        [FeatureConfig("item", TableConfig("item", s.dim, initializer=Normal(0.0, deviation)))],
        optimizer=AdamW(s.learning_rate, beta_2=_BETA_2),
        seed=seed,
    )
    blocks: dict[str, Any] = {
        "blocks": s.blocks,
        "heads": s.heads,
        "attention_dim": s.dim // s.heads,
        "value_dim": s.dim // s.heads,
        "max_length": s.max_length,
        "dropout": s.dropout,
        "seed": seed,
    }
    if s.model in _TIMED and not timed:
        blocks["bias_by_time"] = False
    assert s.max_length is not None  # `NextItemMethod.complete` has decided it
    model = NextItemModel(
        collection,
        _BACKBONES[s.model](**blocks),
        items=cuts.items,
        max_length=s.max_length,
        time="time" if timed else None,
        negatives=s.negatives,
        dropout=s.dropout,
        seed=seed,
        ks=config.ks,
    )
    model.compile(tf.keras.optimizers.Adam(s.learning_rate, beta_2=_BETA_2))
    return model


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

    The best epoch by validation is kept beside the last one. The order of users in an epoch is a function of
    (seed, epoch), so that a resumed run reads the data in the order of an uninterrupted one.

    All ranks of a job call it together. A step's ``users_per_batch`` users are divided among them, so the
    number of ranks changes neither the steps nor, but for rounding and dropout, what is learned; a job may
    resume what another number of ranks began.

    Returns:
      How many epochs earlier calls had done.
    """
    settings = config.methods[method]
    training, validation = _batches(settings)
    model = build(config, method, seed, cuts)
    checkpoints = EpochCheckpoints(folder)
    before = checkpoints.restore(model)
    chooser = _KeepBest(checkpoints, folder / _BEST, _by(config), settings.patience)
    if before < settings.epochs and not _is_over(checkpoints.logged(_by(config)), settings.patience):
        checkpoints.fit(
            model,
            lambda epoch: training(cuts.train, settings, seed, epoch),
            epochs=settings.epochs,
            validation_data=validation(cuts.validation),
            callbacks=[*callbacks, chooser],
            verbose=0,
        )
    return before


def _batches(settings: NextItemMethod | TwoTowerMethod) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what makes batches for training and for validation."""
    if isinstance(settings, TwoTowerMethod):
        return towers.training_batches, towers.validation_batches
    return training_batches, validation_batches


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
      report: Takes the number of epochs done and the NDCG then, while training goes on; it may raise an error
        that ends training.
      callbacks: Keras callbacks.
    """
    settings = config.methods[method]
    model = build(config, method, seed, cuts)
    found: list[float] = []

    def watch(epoch: int, logs: Mapping[str, float]) -> None:
        found.append(float(logs[_by(config)]))
        if _is_over(found, settings.patience):
            model.stop_training = True
        elif len(found) < settings.epochs:
            report(epoch + 1, found[-1])

    training, validation = _batches(settings)
    model.fit(
        training(cuts.train, settings, seed, 0),
        epochs=settings.epochs,
        validation_data=validation(cuts.validation),
        callbacks=[*callbacks, tf.keras.callbacks.LambdaCallback(on_epoch_end=watch)],
        verbose=0,
    )
    return max(found)


class _KeepBest(tf.keras.callbacks.Callback):
    """Keeps the best epoch's weights, and ends training after ``patience`` epochs without a better one."""

    def __init__(self, checkpoints: EpochCheckpoints, folder: Path, by: str, patience: int) -> None:
        super().__init__()
        self._checkpoints, self._folder, self._by, self._patience = checkpoints, folder, by, patience

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        found = [*self._checkpoints.logged(self._by)[:epoch], float((logs or {})[self._by])]
        if int(np.argmax(found)) == epoch:
            store = CheckpointStore(self._folder, keep=1, max_increments=0)
            latest = store.agree_on_latest()
            if latest is not None and step_of(latest) > epoch:  # saved by an epoch that an interruption undid
                store.delete()
                store = CheckpointStore(self._folder, keep=1, max_increments=0)
            store.save(
                tables_by_name(self.model), epoch + 1, dense=lambda path: write_dense(self.model, path)
            )
        if _is_over(found, self._patience):
            self.model.stop_training = True


def load_best(config: CatalogueConfig, method: str, seed: int, *, cuts: Cuts, folder: Path) -> Scorer:
    """Load the best epoch of a method, as what gives scores.

    Raises:
      DataError: The method isn't trained to the end.
    """
    settings = config.methods[method]
    done = read_logged(folder, _by(config))
    if len(done) < settings.epochs and not _is_over(done, settings.patience):
        raise DataError(
            f"{method}, seed {seed}: training isn't over after {len(done)} epochs",
            path=folder,
            advice="run `gmeta train` again to finish",
        )
    model = build(config, method, seed, cuts)
    store = CheckpointStore(folder / _BEST)
    store.load(tables_by_name(model))
    best = store.latest()
    assert best is not None  # or `load` has raised
    read_dense(model, best)
    return towers.TowerScorer(model) if isinstance(settings, TwoTowerMethod) else ModelScorer(model)


def _by(config: CatalogueConfig) -> str:
    """Return what Keras logs and epochs are chosen by."""
    return f"val_ndcg@{config.ks[0]}"


def _is_over(values: Sequence[float], patience: int) -> bool:
    """Return whether training ends after epochs with these values."""
    return bool(values) and len(values) - 1 - int(np.argmax(values)) >= patience


def training_batches(train: Histories, settings: NextItemMethod, seed: int, epoch: int) -> tf.data.Dataset:
    """Return batches of users, in another order in each epoch: that of ``epoch``, then the next ones."""
    assert settings.users_per_batch is not None
    # A token without a successor teaches nothing.
    return in_batches(_ragged(train.choose(train.sizes > 1)), settings.users_per_batch, seed, epoch)


def validation_batches(asked: Asked) -> tf.data.Dataset:
    """Return batches of histories that end with the first item that is asked for."""
    known = np.zeros(len(asked), bool)
    first = asked.targets.row_splits[:-1]
    some = asked.targets.sizes > 0
    known[some] = asked.targets.items[first[some]] >= 0
    asked = asked.choose(known & (asked.histories.sizes > 0))
    ragged = _ragged(asked.histories)
    following = _ragged(asked.targets.first(np.ones(len(asked), np.int64)))
    whole = {name: tf.concat([column, following[name]], axis=1) for name, column in ragged.items()}
    return tf.data.Dataset.from_tensor_slices(whole).batch(_ASKED)


def _ragged(histories: Histories) -> dict[str, tf.RaggedTensor]:
    columns = {"item": histories.items, **({} if histories.times is None else {"time": histories.times})}
    return {
        name: tf.RaggedTensor.from_row_splits(tf.constant(column, tf.int64), histories.row_splits)
        for name, column in columns.items()
    }


@dataclass(frozen=True)
class ModelScorer:
    """A trained model as a `gmeta.experiment.next_item.counting.Scorer`."""

    model: NextItemModel

    def scores(self, histories: Histories) -> Scores:
        """Compute the logits of all items, (users, items)."""
        ragged = _ragged(histories)
        vectors = self.model.item_vectors()
        found = []
        for begin in range(0, len(histories), _ASKED):
            part = {name: column[begin : begin + _ASKED] for name, column in ragged.items()}
            found.append(tf.matmul(self.model(part, training=False), vectors, transpose_b=True).numpy())
        scores = np.concatenate(found).astype(np.float32)
        scores[histories.owner, histories.items] += float(self.model.repeat_bias)
        return scores
