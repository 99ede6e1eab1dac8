"""Keras' `BackupAndRestore` for models with tables.

Keras writes a backup by `tf.train.CheckpointManager`, from one process. With several ranks, each rank has
only a part of the rows, so the backup is a sharded checkpoint, in the subfolder ``sharded`` of the callback's
folder. `ShardedCheckpoint` can load it too. A job of one rank keeps writing sharded checkpoints after loading
one, and a job of several ranks can load a backup that Keras wrote from one rank.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import tensorflow as tf
from tf_keras.src.distribute.worker_training_state import WorkerTrainingState

from gmeta.checkpoint.callback import ShardedCheckpoint
from gmeta.checkpoint.dense_weights import whole_slots
from gmeta.checkpoint.store import CheckpointStore
from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.keras import submodules
from gmeta.core.position import Position

_FOLDER = "sharded"


class TableBackup(WorkerTrainingState):
    """The state with which `tf.keras.callbacks.BackupAndRestore` saves and restores a model with tables.

    Checkpoints don't contain accumulated gradients, so a backup that is due during accumulation waits for the
    optimizer's step.

    Args:
      state: The object that Keras created for the callback.
      model: The model.

    Raises:
      ConfigError: There are several ranks, and the callback's folder is a URL.
    """

    def __init__(self, state: WorkerTrainingState, model: tf.keras.Model) -> None:
        self.__dict__.update(vars(state))
        self._due = False
        self._restored: tuple[int, int] | None = None  # epochs done, steps done in the next one
        self._saver: _Saver | None = None
        several, chief = collectives.world().size > 1, self.read_checkpoint_manager.directory
        if "://" not in chief:
            saver = _Saver(CheckpointStore(Path(chief).parent / _FOLDER, keep=1))
            if several or saver.store.latest() is not None:
                self._saver = saver
                saver.set_model(model)
        elif several:
            raise ConfigError(
                f"BackupAndRestore can't save in {chief} from several ranks: name a folder in a file system "
                "that all of them mount"
            )

    def restore(self) -> None:
        """Restore the latest backup, if there is any; all ranks call this together.

        Raises:
          ConfigError: Another job saves in the folder, or the backup doesn't fit the model.
          DataError: The backup is damaged, or belongs to another model.
        """
        if self._saver is None:
            super().restore()
            return
        self._saver.store.claim()
        latest = self._saver.store.agree_on_latest()
        if latest is not None:
            self._restored = self._saver.restore_progress(latest)
            return
        with self._saver.store.ranks.together(), whole_slots(self._model, gather=False):
            super().restore()  # written by Keras in a job of one rank

    def back_up(self, epoch: int, batch: int = 0) -> None:
        """Save a backup; all ranks call this together.

        Args:
          epoch: The epoch, counted from 0.
          batch: The last trained batch, if backups are made within epochs.

        Raises:
          GmetaError: The backup can't be written; the one before it is whole.
        """
        self._due = bool(getattr(self._model, "is_accumulating", False))
        if self._due:
            return
        if self._save_freq != "epoch":
            self._ckpt_saved_batch.assign(batch)  # Keras stored the first batch of an execution there
        if self._saver is None:
            super().back_up(epoch, batch)
        elif self._save_freq == "epoch":
            self._saver.save_after(epoch + 1, 0)
        else:
            self._saver.save_after(epoch, batch + 1)

    def backup_if_preempted(self) -> None:
        """Save a backup that was postponed; Keras calls this after each batch."""
        super().backup_if_preempted()
        if self._due:
            batches = int(self._model._steps_per_execution.numpy())
            first = int(self._ckpt_saved_batch.numpy())
            self.back_up(int(self._ckpt_saved_epoch.numpy()), first + batches - 1)

    def delete_backup(self) -> None:
        """Delete the backups; all ranks call this together."""
        if self._saver is not None:
            self._saver.store.delete()
        if collectives.world().rank == 0:
            super().delete_backup()

    def maybe_load_initial_counters_from_ckpt(
        self, steps_per_epoch: int | None, initial_epoch: int, mode: str
    ) -> tuple[int, int]:
        """Return the epoch, and the step within it, at which `fit` starts."""
        if self._restored is None:
            found = super().maybe_load_initial_counters_from_ckpt(steps_per_epoch, initial_epoch, mode)
            epoch, step = map(int, found)
        else:
            epoch, step = self._restored
            if step and step == steps_per_epoch:
                epoch, step = epoch + 1, 0
        if step and not any(isinstance(part, Position) for part in submodules(self._model)):
            warnings.warn(
                f"BackupAndRestore: the backup was made after {step} steps of epoch {epoch + 1}, and Keras "
                "trains the rest of the epoch's steps on the first batches of the data: let the model have a "
                "gmeta.io.ReadingPosition, back up by epochs, or use gmeta.checkpoint.ShardedCheckpoint.fit, "
                "which continues with the batches that are left",
                stacklevel=2,
            )
        return epoch, step


class _Saver(ShardedCheckpoint):
    """A `ShardedCheckpoint` that saves on request."""

    def save_after(self, epochs: int, steps: int) -> None:
        """Save a checkpoint of the model's present state.

        Args:
          epochs: How many epochs are done.
          steps: How many steps of the next one are done.
        """
        self._epochs, self._before, self._last_batch = epochs, (), steps - 1
        self._batches = int(self.model._train_counter.numpy())
        self._save()

    def restore_progress(self, checkpoint: Path) -> tuple[int, int]:
        """Restore the model; return how many epochs are done, and how many steps of the next one."""
        epochs = self.restore(self.model, checkpoint)
        self.model._train_counter.assign(self.batches)
        stages, ranks = self.stages_of_epoch, collectives.world().shares.total
        reads_on = any(isinstance(part, Position) and part.counts_groups for part in submodules(self.model))
        if not reads_on and any(before != ranks for before, _ in stages):
            raise ConfigError(
                f"{checkpoint}: the backup was made by {stages[0][0]} ranks within epoch {epochs + 1}, and "
                f"Keras can't divide the rest of it among {ranks}: continue with {stages[0][0]} ranks, or by "
                f"gmeta.checkpoint.ShardedCheckpoint({str(checkpoint.parent)!r}).fit"
            )
        return epochs, sum(steps for _, steps in stages)
