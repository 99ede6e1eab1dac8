"""One training run of a method and a seed, from its last checkpoint to its last epoch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta import io
from gmeta.checkpoint.callback import ShardedCheckpoint
from gmeta.checkpoint.manifest import Manifest
from gmeta.checkpoint.resumed_fit import Stages
from gmeta.checkpoint.store import CheckpointStore
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.files import write_atomically
from gmeta.core.json_values import parse_json
from gmeta.core.schedules import OneCycle
from gmeta.core.schema import OnBad
from gmeta.core.step import StepCallback
from gmeta.core.terminal import Interrupts, remember_interrupts
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.task_sets import measured_tasks, training_tasks
from gmeta.experiment.results.evaluation import TrainingRun
from gmeta.experiment.runs.model_choice import build_model
from gmeta.io.reader_stats import ReaderStats, data_errors
from gmeta.io.readers.read_options import AfterSteps, ReadingTime, Waiting
from gmeta.models import MetaModel
from gmeta.training.joint_optimizer import RateInFit

# Saves and restores checkpoints of a training run and its curves, after and within epochs.


_HISTORY = "history.json"


class EpochCheckpoints(ShardedCheckpoint):
    """A callback that keeps checkpoints of a training run's last two epochs, and the curves so far.

    A checkpoint holds model, tables and optimizer. It is a self-contained `ShardedCheckpoint`: all ranks of a
    job write it, and any number of ranks can read it. The last checkpoint stays whole even if the process is
    killed. Rank 0 writes the curves, ``history.json``.

    With ``every``, further checkpoints are saved within the epochs, and each replaces the one before. An
    interrupted run resumes from the last checkpoint of either kind. If the order of the data is a function of
    the epoch (`gmeta.io.tasks`), the resumed run sees the data that the uninterrupted run would have seen,
    and reaches the same curves.

    Args:
      folder: A folder for this training run alone.
      every: Also save after this many steps.

    Attributes:
      ranks_before: The number of ranks that shared the data of a step when the checkpoint that `restore`
        loaded was saved: the ranks of the job or, in an elastic job, those at its start. 0 if `restore`
        loaded nothing.

    Example:
      ::

        checkpoints = EpochCheckpoints(Path("runs/maml/seed-0"), every=1000)
        checkpoints.fit(
            model,
            lambda epoch, passed: gmeta.io.tasks("data/warm", start=gmeta.io.AfterSteps(passed, epoch)),
            epochs=10,
        )
    """

    def __init__(self, folder: Path, *, every: int | None = None) -> None:
        super().__init__(CheckpointStore(folder, keep=2, max_increments=0), every=every)
        self._file = folder / _HISTORY
        self._history: list[dict[str, float]] = []
        self.ranks_before = 0

    def restore(self, model: tf.keras.Model, checkpoint: Path | None = None, **options: Any) -> int:
        """Load the given checkpoint, or else the latest one, if any; options are those of the base class.

        Returns:
          The number of epochs done.

        Raises:
          ConfigError: A table's width or optimizer differs from the saved one.
          DataError: The checkpoint exists but can't be read, or belongs to another model.
        """
        chosen = checkpoint or self.store.agree_on_latest()
        if chosen is None:
            with self.store.ranks.together():
                self._refuse_other_format()
            self._restored = model
            return 0
        try:
            done = super().restore(model, chosen, **options)
            with self.store.ranks.together():
                self._history = _read_history(self._file) if done else []
                manifest = Manifest.load(chosen)
                self.ranks_before = int(manifest.metadata.get("shares", manifest.world_size))
        except (ConfigError, DataError) as error:
            raise type(error)(
                f"{chosen}: this checkpoint can't be restored: {error}; delete it to go on from the one "
                f"before, or all of {self._file.parent} to train from the start"
            ) from error
        # The history is written first, so it may be one epoch ahead of the checkpoint.
        self._history = self._history[:done]
        return done

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save the epoch that has just ended.

        Raises:
          GmetaError: The checkpoint can't be written; the one before it is whole.
        """
        self._history = [*self._history[:epoch], {k: float(v) for k, v in (logs or {}).items()}]
        try:
            with self.store.ranks.together():
                if self.store.ranks.rank == 0:
                    self._write_history()
            super().on_epoch_end(epoch, logs)
        except GmetaError as error:
            raise type(error)(
                f"epoch {epoch + 1} can't be saved: {error}; the same command goes on from the epoch before"
            ) from error

    def logged(self, name: str) -> list[float]:
        """Return the values that Keras logged under a name, one per epoch done; nan where absent."""
        return [logs.get(name, math.nan) for logs in self._history]

    @property
    def run(self) -> TrainingRun:
        """The curves so far, one point per epoch: training loss and, if measured, held-out MAE or AUC."""
        logged = {"loss": "loss", "mae": "val_mae", "auc": "val_auc"}
        return TrainingRun(
            epoch=list(range(1, len(self._history) + 1)),
            curves={
                curve: [logs.get(name, math.nan) for logs in self._history]
                for curve, name in logged.items()
                if any(name in logs for logs in self._history)
            },
        )

    def _write_history(self) -> None:
        try:
            write_atomically(self._file, json.dumps(self._history) + "\n")
        except OSError as error:
            raise GmetaError(
                f"{self._file}: {error.strerror or error}; make room or mend the folder"
            ) from error

    def _refuse_other_format(self) -> None:
        """Raise an error, rather than overwrite, if the folder holds training by an earlier gmeta."""
        if (self._file.parent / "checkpoint").exists():
            raise DataError(
                "its checkpoints are tf.train.Checkpoint's, from an earlier gmeta, and not sharded ones",
                path=self._file.parent,
                advice="delete the folder, or name another --run, to train from the start",
            )


def read_logged(folder: Path, name: str) -> list[float]:
    """Return the values that Keras logged under a name in a folder's training run, one per epoch done."""
    return [logs.get(name, math.nan) for logs in _read_history(folder / _HISTORY)]


def _read_history(file: Path) -> Any:
    try:
        return parse_json(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"the run's curves can't be read: {error}", path=file) from error


@dataclass(frozen=True)
class Outcome:
    """A training run that has reached its last epoch.

    Attributes:
      run: Its curves.
      epochs_before: The number of epochs done by an earlier call.
      left_out: The records skipped in this call and why, each listed once: "FILE at byte OFFSET: what".
      ranks_before: The number of ranks that shared a step's data in the earlier call; 0 without such a call.
      steps_before: The number of steps of the next epoch done by the earlier call.
      waiting: How long training waited for data in this call.
    """

    run: TrainingRun
    epochs_before: int
    left_out: tuple[str, ...] = ()
    ranks_before: int = 0
    steps_before: int = 0
    waiting: Waiting = field(default_factory=Waiting)


def train(
    config: ExperimentConfig,
    method: str,
    seed: int,
    *,
    data: Path,
    folder: Path,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
    on_bad: OnBad = "raise",
    checkpoint_every: int | None = None,
) -> Outcome:
    """Train one method with one seed, or resume the training from its last checkpoint.

    The order of tasks in an epoch is a function of (seed, epoch), so a resumed run sees the same data as an
    uninterrupted one.

    On N ranks, a step has N times ``tasks_per_batch`` tasks; each rank takes its tasks from its range of the
    epoch's order. All ranks call the function together, and a job may resume training that a different number
    of ranks began. In an elastic job, N is the number of ranks with which the job started.

    Args:
      config: The experiment.
      method: One of ``config.methods``.
      seed: The seed of initial weights, initial rows and the order of tasks.
      data: A prepared data set that has the experiment's splits.
      folder: The folder of this run's checkpoints.
      callbacks: Keras callbacks, for example to show progress.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      checkpoint_every: Also save after this many steps, not only at the end of each epoch.

    Raises:
      DataError: Records are bad, or a checkpoint can't be restored.
    """
    model, checkpoints = restore(config, method, seed, folder=folder, checkpoint_every=checkpoint_every)
    done = len(checkpoints.run.epoch)
    steps = checkpoints.batches_of_epoch // max(checkpoints.ranks_before, 1)
    epochs = config.methods[method].epochs
    stats, time = ReaderStats(), ReadingTime()

    def training(epoch: int, passed: Stages) -> tf.data.Dataset:
        start = AfterSteps(passed, epoch)
        options = io.ReadOptions(seed=seed, on_bad=on_bad, stats=stats)
        return time.of(training_tasks(config, data, start, options, config.methods[method].query))

    if done < epochs:
        with data_errors(), remember_interrupts() as interrupts:
            checkpoints.fit(
                model,
                training,
                epochs=epochs,
                validation_data=measured_tasks(config, data, config.test_splits[0], on_bad, stats),
                callbacks=[
                    *callbacks,
                    *_schedule(config, method, model, training, done, checkpoints),
                    EndWhenInterrupted(interrupts),
                ],
                verbose=0,
            )
    # Every epoch reads the same records again.
    left_out = tuple(dict.fromkeys(stats.read().messages))
    return Outcome(checkpoints.run, done, left_out, checkpoints.ranks_before, steps, time.read())


class EndWhenInterrupted(StepCallback):
    """Raises an interrupt that C++ code cleared, before the next step."""

    def __init__(self, interrupts: Interrupts) -> None:
        super().__init__()
        self._interrupts = interrupts

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Raise the interrupt, if there was one.

        Raises:
          KeyboardInterrupt: There was an interrupt.
        """
        self._interrupts.raise_again()


def _schedule(
    config: ExperimentConfig,
    method: str,
    model: MetaModel,
    training: Callable[[int, Stages], tf.data.Dataset],
    done: int,
    checkpoints: EpochCheckpoints,
) -> list[tf.keras.callbacks.Callback]:
    """Return the callback that sets the learning rate, if it isn't constant.

    A run that a different number of ranks began continues at the share of its steps that is done.
    """
    settings = config.methods[method]
    if settings.schedule == "constant":
        return []
    epoch = int(training(done, ()).cardinality())
    left = (settings.epochs - done) * epoch - checkpoints.batches_of_epoch
    steps = int(model.optimizer.iterations) + max(left, 1)
    return [RateInFit(lambda rate, _: OneCycle(rate, steps))]


def restore(
    config: ExperimentConfig, method: str, seed: int, *, folder: Path, checkpoint_every: int | None = None
) -> tuple[MetaModel, EpochCheckpoints]:
    """Restore a method's model from its last checkpoint; without one, return it at its initial weights."""
    model = build_model(config, method, seed)
    checkpoints = EpochCheckpoints(folder, every=checkpoint_every)
    checkpoints.restore(model)
    return model, checkpoints
