"""One training run of a method and a seed, from its last checkpoint to its last epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tensorflow as tf

from gmeta import io
from gmeta.checkpoint.resumed_fit import Stages
from gmeta.core.data.on_bad import OnBad
from gmeta.core.interrupts import Interrupts, remember_interrupts
from gmeta.core.step_callback import StepCallback
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.task_sets import measured_tasks, training_tasks
from gmeta.experiment.results.evaluation import TrainingRun
from gmeta.experiment.runs.epoch_checkpoints import EpochCheckpoints
from gmeta.experiment.runs.model_choice import build_model
from gmeta.models import MetaModel
from gmeta.models.training.optimizer.one_cycle import OneCycle


@dataclass(frozen=True)
class Outcome:
    """A training run that has reached its last epoch.

    Attributes:
      run: Its curves.
      epochs_before: How many epochs an earlier call had done.
      left_out: The records skipped in this call and why, each listed once: "FILE at byte OFFSET: what".
      ranks_before: How many ranks shared a step's data in the earlier call; 0 if there was no earlier call.
      steps_before: How many steps of the next epoch the earlier call had done.
      waiting: How long training has waited for data in this call.
    """

    run: TrainingRun
    epochs_before: int
    left_out: tuple[str, ...] = ()
    ranks_before: int = 0
    steps_before: int = 0
    waiting: io.Waiting = field(default_factory=io.Waiting)


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

    On N ranks, a step has N times ``tasks_per_batch`` tasks; each rank takes its tasks from its own range of
    the epoch's order. All ranks call the function together, and a job may resume what another number of ranks
    began. In an elastic job, N is the number of ranks that the job was started with.

    Args:
      config: The experiment.
      method: One of ``config.methods``.
      seed: The seed of initial weights, initial rows and the order of tasks.
      data: A prepared data set that has the experiment's splits.
      folder: Where this run's checkpoints are.
      callbacks: Keras callbacks, for example to show progress.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      checkpoint_every: Save after so many steps too, and not only at the end of each epoch.

    Raises:
      DataError: Bad records or a checkpoint that can't be restored.
    """
    model, checkpoints = restore(config, method, seed, folder=folder, checkpoint_every=checkpoint_every)
    done = len(checkpoints.run.epoch)
    steps = checkpoints.batches_of_epoch // max(checkpoints.ranks_before, 1)
    epochs = config.methods[method].epochs
    stats, time = io.ReaderStats(), io.ReadingTime()

    def training(epoch: int, passed: Stages) -> tf.data.Dataset:
        start = io.AfterSteps(passed, epoch)
        options = io.ReadOptions(seed=seed, on_bad=on_bad, stats=stats)
        return time.of(training_tasks(config, data, start, options, config.methods[method].query))

    if done < epochs:
        with io.data_errors(), remember_interrupts() as interrupts:
            checkpoints.fit(
                model,
                training,
                epochs=epochs,
                validation_data=measured_tasks(config, data, config.test_splits[0], on_bad, stats),
                callbacks=[
                    *callbacks,
                    *_schedule(config, method, model, training, done, checkpoints),
                    _EndWhenInterrupted(interrupts),
                ],
                verbose=0,
            )
    # Every epoch reads the same records again.
    left_out = tuple(dict.fromkeys(stats.read().messages))
    return Outcome(checkpoints.run, done, left_out, checkpoints.ranks_before, steps, time.read())


class _EndWhenInterrupted(StepCallback):
    def __init__(self, interrupts: Interrupts) -> None:
        super().__init__()
        self._interrupts = interrupts

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
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

    A run that another number of ranks began goes on at the share of its steps that is done.
    """
    settings = config.methods[method]
    if settings.schedule == "constant":
        return []
    epoch = int(training(done, ()).cardinality())
    left = (settings.epochs - done) * epoch - checkpoints.batches_of_epoch
    return [OneCycle(int(model.optimizer.iterations) + max(left, 1))]


def restore(
    config: ExperimentConfig, method: str, seed: int, *, folder: Path, checkpoint_every: int | None = None
) -> tuple[MetaModel, EpochCheckpoints]:
    """Restore a method's model from its last checkpoint; without one, return it at its initial weights."""
    model = build_model(config, method, seed)
    checkpoints = EpochCheckpoints(folder, every=checkpoint_every)
    checkpoints.restore(model)
    return model, checkpoints
