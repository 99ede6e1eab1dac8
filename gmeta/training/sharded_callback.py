"""Keras' way to sharded checkpoints: a callback that saves a model with its tables, and restores it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError
from gmeta.ops.hash_table import HashTable
from gmeta.ops.table_saving import tables_saved_elsewhere
from gmeta.training.checkpoint.chain import CheckpointReader
from gmeta.training.checkpoint_store import CheckpointStore, step_of

_DENSE = "dense"  # the prefix of TensorFlow's files, in the folder of that name


def tables_of(model: tf.keras.Model) -> dict[str, HashTable]:
    """Every `HashTable` that a model holds, in whatever layer, by the table's name.

    Raises:
      ConfigError: Two tables have one name.
    """
    tables: dict[str, HashTable] = {}
    for thing in tf.train.TrackableView(model).descendants():
        if isinstance(thing, HashTable) and tables.setdefault(thing.name, thing) is not thing:
            raise ConfigError(
                f"two tables of the model are named {thing.name!r}: give their EmbeddingCollections "
                "different names"
            )
    return tables


class ShardedCheckpoint(tf.keras.callbacks.Callback):
    """Saves a model in training: its tables in shards and the rest by ``tf.train.Checkpoint``, together.

    Tables, dense weights and optimizer state are of one moment, between two batches, and appear under one
    name at once: whatever kills the process, the last checkpoint is whole. It is named by the number of
    batches trained. `CheckpointStore` says which are full, incremental, and kept.

    Args:
      store: Where the checkpoints go, and this rank's place among the ranks; or a folder, for a
        `CheckpointStore` as it comes. Every rank takes part in every save; rank 0 saves the dense weights.
      every: Save after so many batches, and at the end of each epoch; None: at the end of each epoch.

    Raises:
      ConfigError: ``every`` is below 1.

    Example:
      ::

        checkpoints = ShardedCheckpoint("runs/a/checkpoints", every=1000)
        model.compile(...)
        first = checkpoints.restore(model)  # 0 where there is nothing to restore
        model.fit(data, initial_epoch=first, epochs=10, callbacks=[checkpoints])
    """

    def __init__(self, store: CheckpointStore | str | os.PathLike[str], *, every: int | None = None) -> None:
        super().__init__()
        if every is not None and every < 1:
            raise ConfigError(f"every must be at least 1, got {every}")
        self.store = store if isinstance(store, CheckpointStore) else CheckpointStore(store)
        self._every = every
        self._batches = 0
        self._epochs = 0
        self._last_batch = -1  # of this epoch
        self._due = False

    @property
    def batches(self) -> int:
        """How many batches have been trained, those before the restored checkpoint included."""
        return self._batches

    def restore(self, model: tf.keras.Model, checkpoint: Path | None = None) -> int:
        """Load the latest checkpoint, or the one named, into a model, if there is one.

        Args:
          model: The model, compiled if its optimizer's state is to come back. Weights that it hasn't made yet
            are restored when it makes them.
          checkpoint: One of ``store.checkpoints()``.

        Returns:
          How many epochs are done. Batches of an epoch that was not finished are in the weights, and will be
          trained again.

        Raises:
          ConfigError: A table has another width or optimizer than was saved.
          DataError: The checkpoint is damaged, or belongs to another model.
        """
        chosen = checkpoint or self.store.latest()
        if chosen is None:
            return 0
        with CheckpointReader(chosen) as reader:
            reader.verify_files()
        info = self.store.load(tables_of(model), chosen)
        try:
            with tables_saved_elsewhere():
                status = _dense(model).read(str(chosen / "dense" / _DENSE))
                status.assert_existing_objects_matched()
        except (tf.errors.OpError, AssertionError, ValueError) as error:
            raise DataError(
                f"its dense weights don't fit this model: {str(error).splitlines()[0]}",
                path=chosen,
                advice="build the model as it was when it was saved",
            ) from error
        self._batches, self._epochs = step_of(chosen), int(info.metadata["epochs"])
        return self._epochs

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Begin to count the epoch's batches."""
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save, if the batch before made it due: after an epoch's last batch, its end is saved instead.

        Raises:
          GmetaError: The checkpoint can't be written; those before it are whole.
        """
        if self._due:
            self._save()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Count the batches: with ``steps_per_execution`` there may be several."""
        before = self._batches
        self._batches += batch - self._last_batch
        self._last_batch = batch
        if self._every is not None and self._batches // self._every > before // self._every:
            self._due = True

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save, with the epoch counted as done.

        Raises:
          GmetaError: The checkpoint can't be written; those before it are whole.
        """
        self._epochs = epoch + 1
        self._save()

    def _save(self) -> None:
        def dense(folder: Path) -> None:
            with tables_saved_elsewhere():
                _dense(self.model).write(str(folder / _DENSE))

        metadata: dict[str, Any] = {"epochs": self._epochs, "batches": self._batches}
        self.store.save(tables_of(self.model), self._batches, dense=dense, metadata=metadata)
        self._due = False


def _dense(model: tf.keras.Model) -> tf.train.Checkpoint:
    optimizer = getattr(model, "optimizer", None)
    return tf.train.Checkpoint(model=model, **({} if optimizer is None else {"optimizer": optimizer}))
