"""Extends Keras' `get_weights` and `set_weights` to the rows of tables, and refuses formats without them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.keras import submodules
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.snapshot import TableSnapshot


class Weights(list[Any]):
    """The `get_weights` of a layer with tables: a list of arrays, and snapshots of the tables.

    The list holds the dense weights, as Keras returns them. A copy of just the list has no table rows, and
    `set_weights` refuses it.

    Attributes:
      tables: A snapshot of each table. While a snapshot lives, its table keeps the old values of rows that
        change.
    """

    def __init__(self, dense: Iterable[Any], tables: Sequence[TableSnapshot]) -> None:
        super().__init__(dense)
        self.tables = tuple(tables)

    def __copy__(self) -> Weights:
        return Weights(self, self.tables)

    copy = __copy__

    def __deepcopy__(self, memo: Any) -> Weights:
        return Weights((np.array(each) for each in self), self.tables)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "weights with snapshots of tables can't leave the process: save them with save_weights"
        )


class HoldsTables:
    """A mixin, placed before Keras' base class, for a layer or model with dynamic tables."""

    def get_weights(self) -> Weights | list[Any]:
        """Return the weights as in Keras, together with snapshots of the tables.

        Returns:
          The dense weights, a list of arrays. For a model with tables the list is a `Weights`. Taking a
          snapshot copies no rows: while the weights are kept, a table copies a row when the row is first
          used or removed afterwards (see `gmeta.ops.TableSnapshot`).
        """
        dense = super().get_weights()  # type: ignore[misc]
        tables = tables_of(self)
        return Weights(dense, [TableSnapshot(table) for table in tables]) if tables else dense

    def set_weights(self, weights: Any) -> None:
        """Restore dense weights and tables, table slots and steps included.

        The weights don't include the Keras optimizer's state, which stays as it is.

        Args:
          weights: What this model's `get_weights` returned.

        Raises:
          ConfigError: The weights are only arrays, or hold the tables of another model.
        """
        tables = tables_of(self)
        if tables:
            _check(self, weights, tables)
        super().set_weights(list(weights))  # type: ignore[misc]
        for snapshot in weights.tables if tables else ():
            snapshot.restore()

    # Keras asks for these two first when it writes a SavedModel or its older HDF5, whichever function it is
    # called by. A SavedModel's writer would replace methods of the layers and, if it fails, leave them
    # replaced.

    @property
    def _trackable_saved_model_saver(self) -> Any:
        self._refuse_format("a SavedModel")
        return super()._trackable_saved_model_saver  # type: ignore[misc]

    @property
    def use_legacy_config(self) -> bool:
        """Whether Keras is writing the layer in its older HDF5 format.

        Raises:
          ConfigError: It begins to, and there are tables.
        """
        return bool(vars(self).get("use_legacy_config", False))

    @use_legacy_config.setter
    def use_legacy_config(self, value: bool) -> None:
        self._refuse_format("Keras' older HDF5 format")
        vars(self)["use_legacy_config"] = value

    @use_legacy_config.deleter
    def use_legacy_config(self) -> None:
        vars(self).pop("use_legacy_config", None)

    def _refuse_format(self, what: str) -> None:
        if tables_of(self):
            raise ConfigError(
                f"{getattr(self, 'name', type(self).__name__)!r}: {what} can't hold dynamic tables, and "
                "nothing was written: gmeta.export.export_model writes a SavedModel for serving; "
                "model.save('….keras') of a gmeta.models.Model, save_weights and tf.train.Checkpoint keep "
                "what is to be trained on"
            )


def tables_of(layer: Any, *, trained: bool = False) -> list[HashTable]:
    """Return the tables of all collections in a layer or model, each table once.

    Args:
      layer: The layer or model.
      trained: Whether to leave out tables of collections that are frozen (``trainable=False``).
    """
    found = {
        id(table): table
        for part in (layer, *submodules(layer))
        for table in getattr(part, "tables", ())
        if isinstance(part, tf.keras.layers.Layer)
        and isinstance(table, HashTable)
        and (part.trainable or not trained)
    }
    return list(found.values())


def _check(layer: Any, weights: Any, tables: Sequence[HashTable]) -> None:
    name = getattr(layer, "name", type(layer).__name__)
    if not isinstance(weights, Weights):
        raise ConfigError(
            f"{name}: set_weights got a {type(weights).__name__} without the rows of its "
            f"table{'s' * (len(tables) > 1)}, which would stay as they are: give it what get_weights gave, "
            "as it is, or use save_weights and load_weights"
        )
    if {id(each.table) for each in weights.tables} != {id(table) for table in tables}:
        raise ConfigError(
            f"{name}: set_weights got the tables of another model: copy a model with save_weights and "
            "load_weights"
        )
