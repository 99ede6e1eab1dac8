"""Keeps a Keras model from being saved without its tables."""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tf_keras.src.utils import io_utils

from gmeta.checkpoint.dense_weights import whole_slots
from gmeta.core import collectives
from gmeta.core.errors import ConfigError, warn_caller
from gmeta.layers.embedding.merge_plan import align
from gmeta.layers.embedding.saved_tables import saved_tables_of, skip_mismatched_tables
from gmeta.layers.embedding.table_weights import HoldsTables, tables_of
from gmeta.ops import HashTable

_BACKUP = "_backup_of_fit"  # where a model keeps the state of `BackupAndRestore`


class SavesTables(HoldsTables):
    """A mixin, placed before `tf.keras.Model`, for a model with dynamic tables.

    TensorFlow's checkpoints find the tables as trackable objects, and Keras' ``.keras`` and ``.weights.h5``
    request each layer's state. The older ``.h5`` lists variables, and a SavedModel would hold native ops:
    these formats are refused rather than written without the tables, whichever function writes them. One of
    several ranks can't write files either, because it has only the rows that it owns.
    """

    @property
    def _training_state(self) -> Any:
        """What Keras' `BackupAndRestore` does its work by; the callback sets it when training begins."""
        return vars(self).get(_BACKUP)

    @_training_state.setter
    def _training_state(self, state: Any) -> None:
        if state is not None:
            from gmeta.checkpoint.backup import TableBackup

            state = TableBackup(state, self)
        vars(self)[_BACKUP] = state

    @_training_state.deleter
    def _training_state(self) -> None:
        vars(self)[_BACKUP] = None

    def save_weights(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save the weights as `tf.keras.Model.save_weights` does, in TensorFlow's format or ``.weights.h5``.

        Raises:
          ConfigError: The format is the older HDF5, which can't hold tables; or there are several ranks.
        """
        _refuse_a_part(filepath)
        _refuse_old_hdf5(filepath, kwargs.get("save_format"))
        super().save_weights(str(filepath), *args, **kwargs)  # type: ignore[misc]

    def load_weights(
        self, filepath: str | Path, skip_mismatch: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Load weights as `tf.keras.Model.load_weights` does.

        Rows find their tables by name, in whatever order the features are and however tables are merged.

        Args:
          filepath: As in Keras.
          skip_mismatch: For ``.weights.h5``, as in Keras. Tables that weren't saved are reinitialized, and
            rows of tables that the model doesn't have are left out; a warning names both.
          *args: As in Keras.
          **kwargs: As in Keras.

        Raises:
          ConfigError: The format is the older HDF5, the weights belong to other tables, or they were found
            without the rows of a collection.
        """
        if not zipfile.is_zipfile(filepath):  # as a .keras file is
            _refuse_old_hdf5(filepath, None)
        restored = [(part, part.restores) for part in saved_tables_of(self)]
        with skip_mismatched_tables(skip_mismatch) as skipped, whole_slots(self, gather=False):
            status = super().load_weights(str(filepath), skip_mismatch, *args, **kwargs)  # type: ignore[misc]
        if skipped:
            warn_caller(f"{filepath}: {'; '.join(skipped)}")
        missed = [part.owner for part, before in restored if part.restores == before]
        if missed and not skip_mismatch:
            raise ConfigError(
                f"{filepath}: dense weights were loaded, but the rows of {', '.join(missed)} weren't found: "
                "the model has other layers than the one that was saved. Make it as it was, or save and "
                "load with gmeta.checkpoint.ShardedCheckpoint, which finds rows by name"
            )
        return status

    def save(self, filepath: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save the model as `tf.keras.Model.save` does, to a ``.keras`` file.

        Raises:
          ConfigError: The format isn't ``.keras``, or there are several ranks.
        """
        _refuse_a_part(filepath)
        if not str(filepath).endswith(".keras") or kwargs.get("save_format") not in (None, "keras"):
            raise ConfigError(
                f"{filepath}: a model with dynamic tables is saved whole as `.keras` alone. Save its state "
                "with save_weights or tf.train.Checkpoint; for serving, gmeta.export.export_model "
                "writes a SavedModel"
            )
        super().save(str(filepath), *args, **kwargs)  # type: ignore[misc]

    def _refuse_format(self, what: str) -> None:
        joint = getattr(self, "_joint_optimizer", None)
        if joint is not None:  # include_optimizer=False has taken it off by now
            self.optimizer = joint.optimizer
        super()._refuse_format(what)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Print `tf.keras.Model.summary`, and after it each table's rows, width and bytes."""
        super().summary(*args, **kwargs)  # type: ignore[misc]
        bound = inspect.signature(tf.keras.Model.summary).bind(self, *args, **kwargs)
        say = bound.arguments.get("print_fn") or io_utils.print_msg
        for line in table_lines(tables_of(self)):
            say(line)

    def export(self, filepath: str | Path) -> None:
        """Refuse Keras' SavedModel for serving, which can't hold tables.

        Raises:
          ConfigError: Always; the message names the function to use instead.
        """
        raise ConfigError(
            f"{filepath}: Keras' export would leave the dynamic tables out: "
            "gmeta.export.export_model writes a SavedModel of TensorFlow ops with them in it"
        )


def table_lines(tables: Sequence[HashTable]) -> list[str]:
    """Format the contents of tables, one line each under headings; on several ranks, this rank's part."""
    if not tables:
        return []
    here = collectives.world()
    owner = f" of rank {here.rank} of {here.size}" if here.size > 1 else ""
    lines = [(f"Table{owner}", "Rows", "Width", "Bytes", "Optimizer")]
    for table in tables:
        statistics = table.statistics()
        counts = (int(statistics.size), table.dim, int(statistics.bytes))
        lines.append((table.name, *(f"{count:,}" for count in counts), type(table.optimizer).__name__))
    return align(lines)


def _refuse_a_part(filepath: str | Path) -> None:
    here = collectives.world()
    if here.size > 1:
        raise ConfigError(
            f"{filepath}: rank {here.rank} of {here.size} has only the rows that it owns, and so would the "
            "file: save with the callback tf.keras.callbacks.BackupAndRestore or "
            "gmeta.checkpoint.ShardedCheckpoint, to which every rank adds its part, and which any number of "
            "ranks can load"
        )


def _refuse_old_hdf5(filepath: str | Path, save_format: str | None) -> None:
    path = str(filepath)
    old = path.endswith((".h5", ".hdf5", ".keras")) and not path.endswith(".weights.h5")
    if old or save_format in ("h5", "keras"):
        raise ConfigError(
            f"{path}: Keras' older HDF5 format would leave the dynamic tables out: use a name without ending "
            "(TensorFlow's checkpoint format) or one that ends in .weights.h5"
        )
