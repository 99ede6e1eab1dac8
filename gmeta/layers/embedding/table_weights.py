"""Extends Keras' `get_weights` and `set_weights` to the rows of tables, and refuses formats without them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, is_framework, warn_caller
from gmeta.core.keras import submodules
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.restored_rows import SavedTable, TableSnapshot, fill_table, plan_moves, warn_of_filters


class Weights(list[Any]):
    """The `get_weights` of a layer with tables: a list of arrays, and snapshots of the tables.

    The list holds the dense weights, as Keras returns them. A copy of just the list has no table rows, and
    `set_weights` refuses it.

    Attributes:
      tables: A snapshot of each table. While a snapshot lives, its table keeps the old values of rows that
        change.
      plans: The plan of each collection, which has the order of its features.
      items: Of a model that chooses among items, what it has counted of them; else None.
    """

    def __init__(
        self,
        dense: Iterable[Any],
        tables: Sequence[TableSnapshot],
        items: Mapping[str, npt.NDArray[Any]] | None = None,
        plans: Sequence[Any] = (),
    ) -> None:
        super().__init__(dense)
        self.tables, self.items, self.plans = tuple(tables), items, tuple(plans)

    def __copy__(self) -> Weights:
        return Weights(self, self.tables, self.items, self.plans)

    copy = __copy__

    def __deepcopy__(self, memo: Any) -> Weights:
        return Weights((np.array(each) for each in self), self.tables, self.items, self.plans)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            "weights with snapshots of tables can't leave the process: save them with save_weights"
        )


class HoldsTables:
    """A mixin, placed before Keras' base class, for a layer or model with dynamic tables."""

    _has_warned = False

    @property
    def weights(self) -> list[tf.Variable]:
        """The dense weights, as in Keras; the first access from outside warns that they lack the tables."""
        self._warn_of_rows(sys._getframe(1).f_globals)
        return super().weights  # type: ignore[misc]

    @property
    def variables(self) -> list[tf.Variable]:
        """The same as `weights`."""
        self._warn_of_rows(sys._getframe(1).f_globals)
        return super().variables  # type: ignore[misc]

    def _warn_of_rows(self, caller: Mapping[str, Any]) -> None:
        """Warn once if code of a user, who may copy a model weight by weight, lists the dense weights."""
        if self._has_warned or is_framework(caller.get("__name__", "")):
            return
        tables = tables_of(self)
        if tables:
            self._has_warned = True
            warn_caller(
                f"{_name(self)}: weights and variables list dense weights alone. The rows of "
                f"{', '.join(table.name for table in tables)} aren't among them: other.set_weights("
                "model.get_weights()) copies both into a model of the same form, and save_weights saves both"
            )

    def get_weights(self) -> Weights | list[Any]:
        """Return the weights as in Keras, together with snapshots of the tables.

        Returns:
          The dense weights, a list of arrays. For a model with tables the list is a `Weights`. Taking a
          snapshot copies no rows: while the weights are kept, a table copies a row when the row is first
          used or removed afterwards (see `gmeta.ops.table.restored_rows.TableSnapshot`).
        """
        dense = super().get_weights()  # type: ignore[misc]
        tables = tables_of(self)
        if not tables:
            return dense
        return Weights(dense, [TableSnapshot(table) for table in tables], plans=_plans(self))

    def set_weights(self, weights: Any) -> None:
        """Restore dense weights and tables, table slots and steps included.

        The weights may be those of another model of the same form: of the online network, for a target
        network. Collections are matched in their order, and their tables by name, however they are merged;
        each table's content is replaced by a copy. On several ranks, each copies the rows that it owns.

        The weights don't include the Keras optimizer's state, which isn't changed.

        Args:
          weights: What `get_weights` of this model, or of one of the same form, returned.

        Raises:
          ConfigError: The weights are only arrays, or hold other tables than this model; nothing has changed
            then.

        Example:
          >>> collection = [EmbeddingCollection([FeatureConfig("item", dim=4)]) for _ in range(2)]
          >>> ids = {"item": tf.constant([7])}
          >>> _ = collection[0].lookup(ids)
          >>> collection[1].set_weights(collection[0].get_weights())
          >>> int(collection[1].tables[0].size())
          1
        """
        tables = tables_of(self)
        restore = _restorer(self, weights, tables) if tables else None
        if restore is not None:
            _follow_orders(self, weights)  # the dense weights belong to the order of the features
        super().set_weights(list(weights))  # type: ignore[misc]
        if restore is not None:
            restore()

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


def _restorer(layer: Any, weights: Any, tables: Sequence[HashTable]) -> Callable[[], None]:
    """Return what restores a layer's tables from the snapshots in some weights; check that they fit."""
    name = _name(layer)
    if not isinstance(weights, Weights):
        raise ConfigError(
            f"{name}: set_weights got a {type(weights).__name__} without the rows of its "
            f"table{'s' * (len(tables) > 1)}, which would stay as they are: give it what get_weights gave, "
            "as it is, or use save_weights and load_weights"
        )
    if {id(each.table) for each in weights.tables} == {id(table) for table in tables}:

        def restore() -> None:
            for snapshot in weights.tables:
                snapshot.restore()

        return restore
    own = _by_place(tables)
    snapshots = dict(zip(_by_place([each.table for each in weights.tables]), weights.tables, strict=True))
    saved = {key: _saved_table(snapshot) for key, snapshot in snapshots.items()}
    moves = plan_moves(own, saved)
    if moves.omissions:
        raise ConfigError(
            f"{name}: set_weights got the tables of another model, which has others: "
            f"{'; '.join(moves.omissions)}; make both models with the same features and optimizers"
        )

    if collectives.world().group_size > 1 and any(
        moves.whole(key, table, saved) is None for key, table in own.items()
    ):
        raise ConfigError(
            f"{name}: set_weights got tables whose ids have other keys, which other ranks own: make both "
            "models with the features in the same order and with the same policies, or load a "
            "ShardedCheckpoint"
        )

    def copy() -> None:
        moves.follow_folds(own)
        for key, table in own.items():
            sources, origin = moves.sources[key], moves.whole(key, table, saved)
            fill_table(table, [(saved[each], pairs) for each, pairs in sources])
            filters = [each for each, _ in sources if tf.size(snapshots[each].admission.filter) > 0]
            if origin is not None and table.admission == snapshots[origin].table.admission:
                table.import_admission(snapshots[origin].admission)
            elif filters:
                warn_of_filters(table, filters)

    return copy


def _plans(layer: Any) -> list[Any]:
    from gmeta.layers.embedding.saved_tables import saved_tables_of

    return [each.plan for each in saved_tables_of(layer)]


def _follow_orders(layer: Any, weights: Weights) -> None:
    from gmeta.layers.embedding.saved_tables import saved_tables_of

    for own, plan in zip(saved_tables_of(layer), weights.plans, strict=False):
        own.order.follow(plan)


def _by_place(tables: Sequence[HashTable]) -> dict[str, HashTable]:
    """Name tables by the place of their collection instead of its name, which may differ between models."""
    places: dict[str, int] = {}
    named = {}
    for table in tables:
        merged = "" if table.merged_keys is None else "+".join(table.merged_keys.tables)
        collection = table.name.removesuffix(merged)
        named[f"{places.setdefault(collection, len(places))}/{merged}"] = table
    return named


def _saved_table(snapshot: TableSnapshot) -> SavedTable:
    table = snapshot.table
    return SavedTable(
        table.merged_keys,
        table.dim,
        snapshot.optimizer,
        snapshot.step,
        lambda: [snapshot.records()],
        lambda: [snapshot.admission],
    )


def _name(layer: Any) -> str:
    return str(getattr(layer, "name", type(layer).__name__))
