"""How TensorFlow's checkpoints and Keras' files hold the tables of a collection.

They hold its physical tables, and a plan: which of the tables that users name were merged in each, and in
which order the features were. Rows are loaded by these names. So the features may come in another order, and
other features or policies may merge the tables in another way.

In TensorFlow's format all tables are the values of one object, which exists whatever the plan is. Checkpoints
from before that have an object for each physical table and one for the plan, which are read too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint.tensor_callable import Callable as LateTensor

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.keras import submodules
from gmeta.core.merged_tables import MergedKeys
from gmeta.ops.distinct import owned_by
from gmeta.ops.table.followed_optimizer import KINDS
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.records import (
    AdmissionState,
    Records,
    are_saved_elsewhere,
    refuse_asynchronous,
    refuse_part,
)
from gmeta.ops.table.restored_rows import Keep, SavedTable, fill_table, plan_moves, warn_of_filters

Widths = tuple[tuple[str, int], ...]
"""Features in their order, with the widths of their vectors."""

Tensors = Mapping[str, Any]
"""What a table gives to TensorFlow's checkpoints: name -> tensor."""

_LAYOUT, _PLAN, _SIZES = "-layout", "-plan", "-sizes"
_FIELDS = tuple(f"-{name}" for name in Records._fields)
_ADMISSION = tuple(f"-admission_{name}" for name in AdmissionState._fields)
_VALUES = (*_FIELDS, *_ADMISSION)
_DTYPES = dict.fromkeys(_VALUES, tf.int64) | {
    "-rows": tf.float32,
    "-slots": tf.float32,
    "-admission_filter": tf.uint8,
    _LAYOUT: tf.string,
}
"""Name of a table's tensor -> its dtype; the names are part of the file format."""
_skipped: ContextVar[list[str] | None] = ContextVar("skipped_tables", default=None)


@contextmanager
def skip_mismatched_tables(skip: bool = True) -> Iterator[list[str]]:
    """Load what fits inside the block.

    Args:
      skip: False: do nothing.

    Yields:
      What isn't loaded, as clauses of a sentence: each load in the block adds its own.
    """
    omissions: list[str] = []
    token = _skipped.set(omissions if skip else None)
    try:
        yield omissions
    finally:
        _skipped.reset(token)


@dataclass(frozen=True)
class Plan:
    """What is noted beside the rows of a collection.

    Attributes:
      features: The features; None in files from before gmeta noted them.
      dims: The width of each physical table.
      keys: The tables that are merged in each.
    """

    features: Widths | None
    dims: tuple[int, ...]
    keys: tuple[MergedKeys, ...]

    def to_json(self) -> str:
        """Write the plan as JSON."""
        tables = [{"dim": dim, **keys.to_json()} for dim, keys in zip(self.dims, self.keys, strict=True)]
        return json.dumps({"features": self.features, "tables": tables})

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read what `to_json` wrote, or the list of tables that earlier versions wrote.

        Raises:
          DataError: It is something else.
        """
        try:
            value = json.loads(text)
            is_earlier = isinstance(value, list)
            tables, features = (value, None) if is_earlier else (value["tables"], value["features"])
            return cls(
                None if features is None else tuple((str(name), int(width)) for name, width in features),
                tuple(int(each["dim"]) for each in tables),
                tuple(MergedKeys.from_json(each) for each in tables),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the plan of a collection's tables isn't what gmeta writes: {error}") from error


class Order(Protocol):
    """The order of a collection's features (`gmeta.layers.embedding.merge_plan.FeatureOrder`)."""

    @property
    def widths(self) -> Widths:
        """The features in the order in which the collection puts their vectors side by side."""

    def follow(self, plan: Plan) -> None:
        """Take over the order of what is loaded."""


class SavedTables(tf.__internal__.tracking.Trackable):
    """What TensorFlow's checkpoints and Keras' files hold of a collection: its physical tables and its plan.

    Args:
      owner: The name of the collection.
      tables: The tables.
      order: The order of the features.

    Attributes:
      owner: The name of the collection.
      tables: The tables.
      restores: How often their content was loaded.
    """

    def __init__(self, owner: str, tables: Sequence[HashTable], order: Order) -> None:
        self.owner, self.tables, self.order = owner, tuple(tables), order
        self.restores = 0
        self.earlier = EarlierTables(self)

    @property
    def plan(self) -> Plan:
        """The plan of these tables."""
        keys = tuple(table.merged_keys or MergedKeys((table.name,)) for table in self.tables)
        return Plan(self.order.widths, tuple(table.dim for table in self.tables), keys)

    def load(self, plan: Plan, saved: Sequence[Tensors]) -> None:
        """Replace the tables' content.

        Args:
          plan: The plan that was saved.
          saved: The tensors of each of its physical tables.

        Raises:
          ConfigError: There are tables on one side alone, or rows or slots don't fit, and mismatched tables
            aren't skipped.
        """
        names = [f"{self.owner}/{'+'.join(keys.tables)}" for keys in plan.keys]
        tensors = dict(zip(names, saved, strict=True))
        there = {name: _saved_table(keys, tensors[name]) for name, keys in zip(names, plan.keys, strict=True)}
        moves, skipped = plan_moves({table.name: table for table in self.tables}, there), _skipped.get()
        if moves.omissions and skipped is None:
            raise ConfigError(
                f"{self.owner!r} has the tables {_show(self.plan)}, but what is loaded was saved with "
                f"{_show(plan)}: {'; '.join(moves.omissions)}. Make the collection with the features and "
                "optimizers that it was saved with, or load what fits: ShardedCheckpoint.restore(model, "
                "partial=True), or load_weights(file, skip_mismatch=True) of a .weights.h5 file"
            )
        if skipped is not None:
            skipped += moves.omissions
        if collectives.world().group_size > 1:
            for name, part in tensors.items():
                refuse_part(f"table {name!r}", json.loads(part[_LAYOUT].numpy()))
        self.order.follow(plan)
        moves.follow_folds({table.name: table for table in self.tables})
        self.restores += 1
        for table in self.tables:
            whole, sources = moves.whole(table.name, table, there), moves.sources[table.name]
            if whole is not None:
                table._restore_from_tensors(dict(tensors[whole]))
                continue
            fill_table(table, [(there[name], pairs) for name, pairs in sources], _own_keys())
            filters = [name for name, _ in sources if np.size(tensors[name]["-admission_filter"])]
            if filters:
                warn_of_filters(table, filters)

    def write(self, store: Any) -> None:
        """Write plan and tables as arrays, into a file of Keras."""
        store["plan"] = np.frombuffer(self.plan.to_json().encode(), np.uint8)
        for index, table in enumerate(self.tables):
            for name, tensor in table.saved_tensors().items():
                value = tensor.numpy()
                store[f"table{index}{name}"] = (
                    np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
                )

    def read(self, store: Any) -> None:
        """Replace the tables' content by what `write` wrote.

        Raises:
          ConfigError: As `load`.
        """
        plan = Plan.from_json(np.asarray(store["plan"]).tobytes())

        def tensors(index: int) -> Tensors:
            found = {name: tf.constant(np.asarray(store[f"table{index}{name}"])) for name in _VALUES}
            return {**found, _LAYOUT: tf.constant(np.asarray(store[f"table{index}{_LAYOUT}"]).tobytes())}

        self.load(plan, [tensors(index) for index in range(len(plan.keys))])

    def _joined(self) -> dict[str, tf.Tensor]:
        """Join the tables' tensors, one after another, with the size of each; rows and slots are flat."""
        parts = [table.saved_tensors() for table in self.tables]
        sizes = tf.stack([[tf.size(part[name], tf.int64) for part in parts] for name in _DTYPES])
        joined = {name: tf.concat([tf.reshape(p.pop(name), [-1]) for p in parts], axis=0) for name in _DTYPES}
        return {**joined, _SIZES: sizes}

    def _split(self, joined: Mapping[str, tf.Tensor]) -> list[dict[str, tf.Tensor]]:
        """Return the tensors of each table, from what `_joined` returned."""
        sizes = joined[_SIZES].numpy().tolist()
        parts: list[dict[str, tf.Tensor]] = [{} for _ in sizes[0]]
        for name, of_tables in zip(_DTYPES, sizes, strict=True):
            for part, values in zip(parts, tf.split(joined[name], of_tables), strict=True):
                part[name] = values
        for part in parts:
            part[_LAYOUT], part["-step"] = part[_LAYOUT][0], part["-step"][0]
            layout, rows = json.loads(part[_LAYOUT].numpy()), len(part["-keys"])
            slots = KINDS[layout["optimizer"]](learning_rate=None).slot_floats(layout["dim"])
            part["-rows"] = tf.reshape(part["-rows"], [rows, layout["dim"]])
            part["-slots"] = tf.reshape(part["-slots"], [rows, slots])
        return parts

    # TensorFlow calls these.

    def _serialize_to_tensors(self) -> dict[str, Any]:
        plan = {_PLAN: tf.constant(self.plan.to_json())}
        if are_saved_elsewhere():
            return plan
        if not tf.executing_eagerly():
            return {**self._joined(), **plan}
        # A restore calls this too, for names and types: only a save exports.
        saved = functools.cache(self._joined)
        dtypes = {**_DTYPES, _SIZES: tf.int64}
        device = plan[_PLAN].device  # of one task: TensorFlow restores several in a graph
        late = {n: LateTensor(lambda name=n: saved()[name], dtype, device) for n, dtype in dtypes.items()}
        return {**late, **plan}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        plan = Plan.from_json(restored_tensors[_PLAN].numpy())
        if _SIZES in restored_tensors:
            self.load(plan, self._split(restored_tensors))
        else:  # the rows were saved elsewhere
            self.order.follow(plan)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """Refuse asynchronous checkpoints."""
        refuse_asynchronous(repr(self.owner))

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "checkpoint":
            children |= {str(number): table for number, table in enumerate(self.tables)}
        return children

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name.isdecimal():  # a physical table by its number
            return self.earlier.table(int(name))
        return super()._lookup_dependency(name, *args, **kwargs)


class SavesItsTables:
    """A mixin, placed before Keras' base class, for a collection, whose files hold its tables.

    Attributes:
      tables: The physical tables.
    """

    name: str
    tables: list[HashTable]

    @tf.__internal__.tracking.no_automatic_dependency_tracking
    def _hold(self, tables: list[HashTable], order: Order) -> None:
        """Keep tables, which checkpoints hold as one object."""
        self.tables, self._saved = tables, SavedTables(self.name, tables, order)
        self._track_trackable(self._saved, name="tables")  # type: ignore[attr-defined]

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "_plan_check":  # in checkpoints from before the tables were one object
            return self._saved.earlier
        return super()._lookup_dependency(name, *args, **kwargs)  # type: ignore[misc]

    # Keras calls these for `.keras` and `.weights.h5`.

    def save_own_variables(self, store: Any) -> None:
        """Write the tables' complete records."""
        self._saved.write(store)

    def load_own_variables(self, store: Any) -> None:
        """Replace the tables' contents by what `save_own_variables` wrote."""
        self._saved.read(store)


def _own_keys() -> Keep | None:
    """Return what finds the keys that this rank owns; None: it owns all."""
    here = collectives.world()
    if here.group_size == 1:
        return None
    return lambda keys: owned_by(keys, here.group_rank, here.group_size).numpy()


def _saved_table(keys: MergedKeys, tensors: Tensors) -> SavedTable:
    """Describe the records in a table's tensors."""
    layout = json.loads(tensors[_LAYOUT].numpy())
    records = Records(*(np.asarray(tensors[name]) for name in _FIELDS))
    state = AdmissionState(*(np.asarray(tensors[name]) for name in _ADMISSION))
    return SavedTable(
        keys, layout["dim"], layout["optimizer"], int(records.step), lambda: [records], lambda: [state]
    )


def _show(plan: Plan) -> str:
    return "; ".join(
        f"{', '.join(keys.tables)} ({dim} wide"
        + (f", ids of {', '.join(keys.hashed)} hashed)" if keys.hashed else ")")
        for dim, keys in zip(plan.dims, plan.keys, strict=True)
    )


def saved_tables_of(layer: Any) -> list[SavedTables]:
    """Return what is saved of the tables of each collection in a layer or model."""
    parts = {id(part): part for part in (layer, *submodules(layer))}.values()
    return [part._saved for part in parts if isinstance(getattr(part, "_saved", None), SavedTables)]


class EarlierTables(tf.train.experimental.PythonState):
    """Reader of checkpoints with an object for each physical table, and this one for the plan.

    TensorFlow restores the plan first, then the tables.
    """

    def __init__(self, tables: SavedTables) -> None:
        self._tables = tables
        self._plan: Plan | None = None
        self._found: dict[int, Tensors] = {}
        self._readers: dict[int, _EarlierTable] = {}  # TensorFlow holds them by weak references alone

    def table(self, index: int) -> _EarlierTable:
        """Return what reads a physical table by its number."""
        return self._readers.setdefault(index, _EarlierTable(self, index))

    def serialize(self) -> str:
        """Return the plan as JSON."""
        return self._tables.plan.to_json()

    def deserialize(self, string_value: str | bytes) -> None:
        """Receive the plan."""
        self._plan, self._found = Plan.from_json(string_value), {}
        if are_saved_elsewhere():
            self._tables.order.follow(self._plan)

    def receive(self, index: int, tensors: Tensors) -> None:
        """Receive the tensors of a physical table, and load all tables once they are complete."""
        self._found[index] = tensors
        plan = self._plan or self._tables.plan  # the first checkpoints had none
        if len(self._found) == len(plan.keys):
            found, self._found, self._plan = self._found, {}, None
            self._tables.load(plan, [found[number] for number in sorted(found)])


class _EarlierTable(tf.__internal__.tracking.Trackable):
    def __init__(self, owner: EarlierTables, index: int) -> None:
        self._owner, self._index = owner, index

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        """Return tensors of the names and types to restore, without content."""
        return {name: tf.zeros([0], dtype) for name, dtype in _DTYPES.items()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        if restored_tensors:
            self._owner.receive(self._index, restored_tensors)
