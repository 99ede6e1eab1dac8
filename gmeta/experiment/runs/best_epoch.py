"""Trains until validation no longer improves, keeps the best epoch, and reads the trained run.

Experiments on catalogues and on rows train this way; cold start trains for a fixed number of epochs
(`gmeta.experiment.runs.all_runs`). A training run's folder has the checkpoints of the last epoch and its
curves, and ``best``, the weights of the best epoch. The experiment's folder has the choices by validation
(`CHOSEN`), and `TrainedRun` its methods and baselines.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from gmeta.checkpoint.dense_weights import read_dense, whole_slots, write_dense
from gmeta.checkpoint.store import CheckpointStore, step_of
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import explain_write_errors, write_atomically
from gmeta.core.json_values import parse_json
from gmeta.experiment.plan.next_item_config import BLEND
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.runs.trainer import EpochCheckpoints, read_logged
from gmeta.ops.table.restored_rows import tables_by_name

BEST = "best"
"""The part of a training run's folder that has the best epoch."""

Batches = Callable[[int], tf.data.Dataset]
"""An epoch's number -> the training batches of that epoch and of the next ones."""


@dataclass(frozen=True)
class Stopping:
    """Which epoch is the best, and when training ends.

    Attributes:
      logged: The value that Keras logs and that chooses epochs, such as ``"val_loss"``.
      higher: Whether a higher value is better.
      epochs: The maximum number of epochs.
      patience: The number of epochs without an improvement after which training ends.

    Example:
      >>> Stopping("val_loss", False, epochs=9, patience=2).is_over([0.7, 0.5, 0.6, 0.6])
      True
    """

    logged: str
    higher: bool
    epochs: int
    patience: int

    def best(self, values: Sequence[float]) -> int:
        """Return the index of the best value, the first if several are equal; NaN is the worst."""
        found = np.asarray(values, np.float64) * (1 if self.higher else -1)
        return int(np.argmax(np.where(np.isnan(found), -np.inf, found)))

    def is_over(self, values: Sequence[float]) -> bool:
        """Return whether training ends after epochs with these values."""
        waited = len(values) - 1 - self.best(values) if values else 0
        return bool(values) and (len(values) >= self.epochs or waited >= self.patience)


def train(
    model: tf.keras.Model,
    folder: Path,
    stopping: Stopping,
    training: Batches,
    validation: tf.data.Dataset,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
) -> int:
    """Train a model, or resume its training; the best epoch is kept beside the last one.

    All ranks of a job call it together; a job may resume training that a different number of ranks began.

    Args:
      model: A compiled model whose optimizer is built: a checkpoint restores moments into existing variables.
      folder: The folder of the training run.
      stopping: When training ends.
      training: The batches, as a function of the epoch, so that a resumed run reads the data in the order of
        an uninterrupted one.
      validation: The batches that are measured after each epoch.
      callbacks: Keras callbacks.

    Returns:
      How many epochs earlier calls had done.
    """
    checkpoints = EpochCheckpoints(folder)
    before = checkpoints.restore(model)
    if before < stopping.epochs and not stopping.is_over(checkpoints.logged(stopping.logged)):
        checkpoints.fit(
            model,
            training,
            epochs=stopping.epochs,
            validation_data=validation,
            callbacks=[*callbacks, _KeepBest(checkpoints, folder / BEST, stopping)],
            verbose=0,
        )
    return before


class _KeepBest(tf.keras.callbacks.Callback):
    """Keeps the best epoch's weights, and ends training."""

    def __init__(self, checkpoints: EpochCheckpoints, folder: Path, stopping: Stopping) -> None:
        super().__init__()
        self._checkpoints, self._folder, self._stopping = checkpoints, folder, stopping

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        logged = self._stopping.logged
        found = [*self._checkpoints.logged(logged)[:epoch], float((logs or {})[logged])]
        if self._stopping.best(found) == epoch:
            store = CheckpointStore(self._folder, keep=1, max_increments=0)
            latest = store.agree_on_latest()
            if latest is not None and step_of(latest) > epoch:  # saved in an epoch that an interruption lost
                store.delete()
                store = CheckpointStore(self._folder, keep=1, max_increments=0)
            with whole_slots(self.model, gather=True):
                store.save(
                    tables_by_name(self.model), epoch + 1, dense=lambda path: write_dense(self.model, path)
                )
        if self._stopping.is_over(found):
            self.model.stop_training = True


def measure(
    model: tf.keras.Model,
    stopping: Stopping,
    training: Batches,
    validation: tf.data.Dataset,
    report: Callable[[int, float], None] = lambda epoch, value: None,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
) -> float:
    """Train a model as `train` does, but save nothing, and return the best epoch's value.

    Args:
      model: A compiled model.
      stopping: When it ends.
      training: The batches.
      validation: The batches that are measured after each epoch.
      report: Called during training with the number of epochs done and the value then; it may raise an error
        to end training.
      callbacks: Keras callbacks.
    """
    found: list[float] = []

    def watch(epoch: int, logs: Mapping[str, float]) -> None:
        found.append(float(logs[stopping.logged]))
        if stopping.is_over(found):
            model.stop_training = True
        else:
            report(epoch + 1, found[-1])

    model.fit(
        training(0),
        epochs=stopping.epochs,
        validation_data=validation,
        callbacks=[*callbacks, tf.keras.callbacks.LambdaCallback(on_epoch_end=watch)],
        verbose=0,
    )
    return found[stopping.best(found)]


def load_best(build: Callable[[], Any], folder: Path, stopping: Stopping, name: str) -> Any:
    """Return a model with the weights of the best epoch.

    Args:
      build: Makes the model at its initial weights.
      folder: The folder of the training run.
      stopping: When its training ends.
      name: The name of the training run in messages.

    Raises:
      DataError: Training isn't finished.
    """
    done = read_logged(folder, stopping.logged)
    if not stopping.is_over(done):
        raise DataError(
            f"{name}: training isn't over after {len(done)} epochs",
            path=folder,
            advice="run `gmeta train` again to finish",
        )
    model = build()
    load_weights(model, folder)
    return model


def load_weights(model: tf.keras.Model, folder: Path) -> None:
    """Load the weights, the rows and, if the model is compiled, the optimizer's state of the best epoch.

    Args:
      model: The model.
      folder: The folder of the training run.
    """
    store = CheckpointStore(folder / BEST)
    store.load(tables_by_name(model))
    best = store.latest()
    assert best is not None  # or else `load` raised
    read_dense(model, best)


CHOSEN = "chosen.json"
"""The settings of the baselines and the weights of the blends, by validation."""


@dataclass(frozen=True)
class TrainedRun:
    """A trained run, ready to score.

    Attributes:
      config: Its settings.
      baselines: Name -> the fitted baseline.
      described: Name of a baseline or of the blend -> its settings as part of a sentence.
      methods: Method -> seed -> its scorer; the blend is among them.
      validation: Method or baseline -> its value in validation, which determines the best. The blend's few
        weights are fitted to the same data.
    """

    HIGHER: ClassVar[bool]
    """Whether a higher value in validation is better."""
    LABELS: ClassVar[Mapping[str, str]]
    """Baseline -> what tables call it."""

    config: Any
    baselines: Mapping[str, Any]
    described: Mapping[str, str]
    methods: Mapping[str, Mapping[int, Any]]
    validation: Mapping[str, float]

    @property
    def best(self) -> str:
        """The method or baseline that is best in validation."""
        return (max if self.HIGHER else min)(self.validation, key=self.validation.__getitem__)

    def label(self, name: str) -> str:
        """Return the name of a method or a baseline in tables."""
        if name == BLEND:
            return "blend of all"
        own = self.config.methods.get(name)
        return str(own.label if own else self.LABELS[name])

    def choose(self, name: str | None, seed: int | None) -> tuple[str, Any]:
        """Return the name and the scorer of a method or a baseline.

        Args:
          name: Which one; None: the best in validation, a method or a baseline.
          seed: Which of its seeds; None: the first. Baselines have no seeds.

        Raises:
          ConfigError: There is no such method or seed.
        """
        known = [*self.methods, *self.baselines]
        name = self.best if name is None else name
        if name not in known:
            raise ConfigError(f"the run has no method {name!r}; it has {', '.join(known)}")
        if name in self.baselines:
            if seed is not None:
                raise ConfigError(f"{name} is a baseline, which has no seed: leave seed {seed} out")
            return name, self.baselines[name]
        seeds = self.methods[name]
        seed = next(iter(seeds)) if seed is None else seed
        if seed not in seeds:
            raise ConfigError(f"the run has no seed {seed}; it has {', '.join(map(str, seeds))}")
        return name, seeds[seed]


def save_chosen(run: RunFolder, chosen: Mapping[str, Any]) -> None:
    """Write the choices by validation, as JSON values."""
    with explain_write_errors(run.path / CHOSEN):
        write_atomically(run.path / CHOSEN, json.dumps(chosen, indent=1) + "\n")


@contextlib.contextmanager
def read_chosen(run: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield what `save_chosen` wrote, and explain errors that its use raises in the block.

    Raises:
      DataError: The run isn't fully trained, or gmeta didn't write the file.
    """
    file = run.path / CHOSEN
    try:
        yield parse_json(file.read_text())
    except FileNotFoundError as error:
        raise DataError(
            "training isn't over", path=run.path, advice="run `gmeta train` again to finish"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"not what gmeta writes: {error}", path=file, advice="delete it, and run `gmeta train` again"
        ) from error
