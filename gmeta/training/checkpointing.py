"""A checkpoint at the end of every epoch, and the way back to it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import write_atomically
from gmeta.training.evaluation import TrainingRun


class EpochCheckpoints(tf.keras.callbacks.Callback):
    """Keeps the last two epochs of a training run: model, tables, optimizer, and the curves so far.

    The embedding tables travel with the model: keys, rows, optimizer slots and step counts. What was saved
    is whole or absent, at any moment that the process may die: the file that names the latest checkpoint is
    replaced only after the checkpoint is written.

    There is none from the middle of an epoch: a run that ends there goes on from the end of the epoch before,
    and trains the whole epoch, as if the part of it had never been; with data whose order is a function of
    the epoch (`gmeta.io.tasks`), on what the uninterrupted run would have seen.

    Args:
      model: A compiled model.
      folder: Of this training run alone.

    Example:
      ::

        checkpoints = EpochCheckpoints(model, Path("runs/maml/seed-0"))
        first = checkpoints.restore()
        model.fit(data, initial_epoch=first, epochs=10, callbacks=[checkpoints])
    """

    def __init__(self, model: tf.keras.Model, folder: Path) -> None:
        super().__init__()
        self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, epoch=self._epoch)
        self._manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)
        self._file = folder / "history.json"
        self._history: list[dict[str, float]] = []

    def restore(self) -> int:
        """Load the latest checkpoint, if there is one.

        Returns:
          How many epochs are done.

        Raises:
          DataError: The checkpoint is there but can't be read, or belongs to another model.
        """
        latest = self._manager.latest_checkpoint
        if latest is None:
            return 0
        try:
            self._manager.checkpoint.restore(latest).assert_existing_objects_matched()
            self._history = json.loads(self._file.read_text())
        except (tf.errors.OpError, AssertionError, OSError, ValueError) as error:
            raise DataError(
                f"this checkpoint can't be restored: {str(error).splitlines()[0]}",
                path=latest,
                advice="delete its folder to train anew",
            ) from error
        done = int(self._epoch.numpy())
        # The history is written first, so it may be one epoch ahead of the checkpoint.
        self._history = self._history[:done]
        return done

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save the epoch that has just ended.

        Raises:
          GmetaError: It can't be written; the checkpoint before it is whole.
        """
        self._history = [*self._history[:epoch], {k: float(v) for k, v in (logs or {}).items()}]
        self._epoch.assign(epoch + 1)
        try:
            write_atomically(self._file, json.dumps(self._history) + "\n")
            self._manager.save()
        except (OSError, tf.errors.OpError) as error:
            raise GmetaError(
                f"{self._file.parent}: epoch {epoch + 1} can't be saved: {str(error).splitlines()[0]}; "
                "make room or mend the folder, then run the same command to go on from the epoch before"
            ) from error

    @property
    def run(self) -> TrainingRun:
        """The curves so far: training loss and held-out MAE, one point an epoch."""
        return TrainingRun(
            epoch=list(range(1, len(self._history) + 1)),
            curves={
                "loss": [logs.get("loss", math.nan) for logs in self._history],
                "mae": [logs.get("val_mae", math.nan) for logs in self._history],
            },
        )
