"""The signatures through which a stock server takes deltas, in TensorFlow's own ops.

The graph reads a delta (`gmeta.export.model_deltas`). Before it changes anything, it checks that the delta is
whole, of this model, and updates the version that the server has. A delta that the server already has
changes nothing. Otherwise the graph deletes removed ids, sets rows, assigns weights, and sets the version
last. Each of these steps is atomic (for rows, a few at a time), but not all together: a request meanwhile
may read some rows from before and some from after the delta.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.keras import submodules
from gmeta.core.merged_tables import NamedTable, tables_by_full_name
from gmeta.core.position import positions_in
from gmeta.core.row_formats import RowDtype
from gmeta.export.derived import Value
from gmeta.export.model_deltas import AFTER, CHECKSUM, FINGERPRINT, HEAD, MAGIC, SIZE, VERSION, Layout
from gmeta.export.signature import Signature
from gmeta.models.sequence.history_model import HistoryModel
from gmeta.ops import HashTable
from gmeta.ops.table.portable_tables import LiveTable, PortableTables, own_rows
from gmeta.ops.table.restored_rows import tables_by_name


class Updates:
    """Adds to an exported model the signatures that take deltas.

    Args:
      layout: The stream's layout, of the same model.
      version: The version of the exported model; the first delta that it takes updates this one.
      gathered: Table -> its (n,) keys and (n, dim) rows, where its process doesn't have all of them; what is
        exported is forgotten.
    """

    def __init__(
        self, layout: Layout, version: int, gathered: dict[str, tuple[Any, Any]] | None = None
    ) -> None:
        self._layout, self._version, self._gathered = layout, version, gathered or {}
        self.resources: list[Any] = []  # the exported object must keep these

    @property
    def rows(self) -> RowDtype:
        """The dtype of the rows in the deltas."""
        return self._layout.rows

    def rows_of(self, table: HashTable) -> tuple[Any, Any]:
        """Return the keys and rows of a table that are exported."""
        return self._gathered.pop(table.name) if table.name in self._gathered else own_rows(table)

    def signatures(
        self,
        model: tf.keras.Model,
        copies: PortableTables,
        read: Sequence[tf.Variable],
        derived: Sequence[Value] = (),
    ) -> dict[str, Signature]:
        """Return ``apply_delta``, which takes a delta's bytes, and ``delta_version``; both return a version.

        Args:
          model: The model.
          copies: The copies of its tables that the exported graphs read.
          read: The variables that the graphs read.
          derived: The values that the export computes from the model, and deltas compute again.

        Raises:
          ConfigError: The graphs read something that deltas don't change: other values computed from the
            model at export, a table of another model, or a weight that the layout lacks.
        """
        if layout_of(model, self._layout.stream, self._layout.rows) != self._layout:
            raise ConfigError(
                f"{model.name} has other tables and weights than its stream of deltas: build it, by a call "
                "on a batch, before it is published"
            )
        own = {id(table) for table in tables_of(model)}
        if others := sorted(table.name for table, _ in copies.copies if id(table) not in own):
            raise ConfigError(
                f"{model.name} can't be updated by deltas: its graph reads {', '.join(others)}, which isn't "
                "a table of its layers"
            )
        copy_of = {id(table): copy for table, copy in copies.copies}
        physical = {table.name: copy_of.get(id(table)) for table in tables_of(model)}
        tables = {
            name: (named, copy)
            for name, named in named_tables(model).items()
            if isinstance(copy := physical[named.physical], LiveTable)
        }
        weights = dense_weights(model)
        known = {variable.ref(): name for name, variable in weights.items()}
        computed = {variable.ref() for value in derived for variable in value.variables}
        read = [*read, *(variable for value in derived for variable in value.read)]
        strange = sorted(
            {
                variable.name
                for variable in read
                if variable.ref() not in {*known, *computed, *_state(model)} and _changes(variable)
            }
        )
        if strange:
            raise ConfigError(
                f"{model.name} can't be updated by deltas: its graph reads {', '.join(strange)}, which the "
                "export computes from the model: let a gmeta.export.derived.Derived compute it"
            )
        used = {known[variable.ref()] for variable in read if variable.ref() in known}
        dense = {name: weights[name] for name in weights if name in used}
        apply = Apply(self._layout, self._version, tables, dense, derived)
        self.resources = [apply.lock, apply.version]
        return apply.signatures


def _changes(variable: tf.Variable) -> bool:
    """Return whether a variable that isn't a weight was computed from weights, as rows and vectors are."""
    return bool(variable.dtype.is_floating)


def tables_of(model: tf.keras.Model) -> list[HashTable]:
    """Return the tables of a model's layers, sorted by name.

    Raises:
      ConfigError: Two have the same name.
    """
    return [table for _, table in sorted(tables_by_name(model).items())]


def named_tables(model: tf.keras.Model) -> dict[str, NamedTable]:
    """Return the tables that users named, by their full names."""
    return tables_by_full_name({table.name: table.merged_keys for table in tables_of(model)})


def dense_weights(model: tf.keras.Model) -> dict[str, tf.Variable]:
    """Return a model's weights by name, without state that no answer needs; equal names are numbered.

    The counts by which a model answers an empty history are among them.
    """
    found: dict[str, tf.Variable] = {}
    state = _state(model)
    parts = [part for part in (model, *submodules(model)) if isinstance(part, HistoryModel)]
    counts = [each for part in parts if part.answers_popular for each in part.catalogue.variables]
    for variable in [*model.weights, *counts]:
        if variable.ref() in state or not variable.shape.is_fully_defined():
            continue
        name, number = variable.name, 1
        while name in found:
            name, number = f"{variable.name}#{number}", number + 1
        found[name] = variable
    return found


def _state(model: tf.keras.Model) -> set[Any]:
    """Return references to the variables of metrics and positions, which Keras counts among weights."""
    parts = [*model.metrics, *positions_in(model)]
    return {variable.ref() for part in parts for variable in part.variables}


def layout_of(model: tf.keras.Model, stream: str, rows: RowDtype = "float32") -> Layout:
    """Describe a model for a stream of deltas, which have rows of a dtype.

    Raises:
      ConfigError: Rows of a table cool down to float16 without being used, or a weight holds text.
    """
    for table in tables_of(model):
        if table.precision is not None and table.precision.half_life is not None:
            raise ConfigError(
                f"table {table.name!r} has TwoPrecisions(half_life=...), by which rows change that no step "
                "touches: deltas don't have them"
            )
    for name, variable in dense_weights(model).items():
        if variable.dtype not in _DECODED:
            raise ConfigError(f"deltas can't hold weight {name}, of dtype {variable.dtype.name}")
    dims = {table.name: table.dim for table in tables_of(model)}
    return Layout(
        stream,
        {name: dims[named.physical] for name, named in named_tables(model).items()},
        {
            name: (tuple(variable.shape.as_list()), variable.dtype.name)
            for name, variable in dense_weights(model).items()
        },
        rows,
    )


class Lock(tf.saved_model.experimental.TrackableResource):
    """A TensorFlow mutex; its owner is the tensor that `MutexLock` returns."""

    def __init__(self) -> None:
        super().__init__(device="CPU")
        with tf.init_scope():
            _ = self.resource_handle

    def _create_resource(self) -> tf.Tensor:
        return tf.raw_ops.MutexV2(shared_name=f"gmeta_lock_{uuid.uuid4().hex}")


class Apply:
    """Signatures of an exported model that takes deltas.

    Args:
      layout: The stream's layout.
      version: The version of the exported model.
      tables: Table of the layout -> where its rows are, and the copy that holds them; only tables that the
        model reads. Rows of other tables are skipped.
      dense: Dense weight of the layout -> the variable that the exported model reads.
      derived: The values that a delta computes again.
    """

    def __init__(
        self,
        layout: Layout,
        version: int,
        tables: Mapping[str, tuple[NamedTable, LiveTable]],
        dense: Mapping[str, tf.Variable],
        derived: Sequence[Value] = (),
    ) -> None:
        self._layout, self._tables, self._dense, self._derived = layout, tables, dense, derived
        self.version = tf.Variable(version, dtype=tf.int64, trainable=False, name="delta_version")
        self.lock = Lock()

    @property
    def signatures(self) -> dict[str, Signature]:
        """``apply_delta``, which takes a delta's bytes, and ``delta_version``; both return the version."""
        return {
            "apply_delta": Signature(
                lambda inputs: {"delta_version": self._apply(inputs["delta_bytes"])},
                {"delta_bytes": tf.TensorSpec([], tf.string)},
            ),
            "delta_version": Signature(lambda inputs: {"delta_version": self.version.read_value()}, {}),
        }

    def _apply(self, delta: tf.Tensor) -> tf.Tensor:
        """Apply a delta under a lock, so that the version is checked and set together."""
        held = tf.raw_ops.MutexLock(mutex=self.lock.resource_handle)
        with tf.control_dependencies([held]):
            version = self._check_and_change(tf.identity(delta))
        with tf.control_dependencies([version]):
            released = tf.raw_ops.ConsumeMutexLock(mutex_lock=held)
        with tf.control_dependencies([released]):
            return tf.identity(version)

    def _check_and_change(self, delta: tf.Tensor) -> tf.Tensor:
        layout = self._layout
        head = HEAD + 2 * len(layout.tables) + len(layout.dense)
        size = tf.strings.length(delta)  # an int32: negative from 2 GiB on
        long = tf.logical_or(size < 0, size >= 8 * head)
        with tf.control_dependencies([tf.debugging.Assert(long, ["not a delta of gmeta: size", size])]):
            words = _read(delta, tf.constant(0, tf.int64), head, tf.int64)
        whole = tf.logical_and(words[SIZE] >= head, words[SIZE] < _LONGEST)
        whole = tf.logical_and(whole, tf.equal(tf.cast(8 * words[SIZE], tf.int32), size))
        checks = [
            tf.debugging.Assert(tf.equal(words[0], MAGIC), ["not a delta of gmeta"]),
            tf.debugging.Assert(whole, ["the delta is damaged: its size is", size, "; copy it again"]),
        ]
        with tf.control_dependencies(checks):
            checksum = _checksum(delta, tf.identity(words[SIZE]))
        sound = tf.equal(checksum - (2 * CHECKSUM + 1) * words[CHECKSUM], words[CHECKSUM])
        after, version, now = words[AFTER], words[VERSION], self.version.read_value()
        known = version <= now
        checks = [
            tf.debugging.Assert(sound, ["the delta is damaged: its checksum differs; copy it again"]),
            tf.debugging.Assert(
                tf.equal(words[FINGERPRINT], self._layout.fingerprint),
                ["the delta is of another model or training"],
            ),
            tf.debugging.Assert(
                tf.logical_or(known, tf.equal(after, now)),
                ["the delta continues version", after, "and this replica has version", now,
                 ": send the deltas between them first"],
            ),
        ]  # fmt: skip
        with tf.control_dependencies(checks):
            return tf.cond(known, lambda: tf.identity(now), lambda: self._change(delta, words, version))

    def _change(self, delta: tf.Tensor, words: tf.Tensor, version: tf.Tensor) -> tf.Tensor:
        layout = self._layout
        tables, dense = len(layout.tables), len(layout.dense)
        counts = tf.reshape(words[HEAD : HEAD + 2 * tables], [tables, 2])
        has = words[HEAD + 2 * tables :]
        place = tf.constant(8 * (HEAD + 2 * tables + dense), tf.int64)  # in bytes
        done: list[Any] = []
        changed: list[tuple[LiveTable, tf.Tensor]] = []
        given: dict[Any, tf.Tensor] = {}
        for number, name in enumerate(layout.tables):
            form = layout.format_of(name)
            rows, removed = counts[number, 0], counts[number, 1]
            middle = place + 8 * removed
            if name in self._tables:
                named, table = self._tables[name]
                prefix = tf.constant(named.prefix, tf.int64)
                if self._derived:
                    ids = _read(delta, place, removed + rows, tf.int64)
                    changed.append((table, ids | prefix))
                with tf.control_dependencies([_remove(table, delta, place, removed, prefix)]):
                    done.append(_upsert(table, delta, middle, rows, prefix))
            place = middle + 8 * (rows + (rows * form.width + 1) // 2)
        for number, (name, (shape, dtype)) in enumerate(layout.dense.items()):
            kind, count = tf.as_dtype(dtype), int(np.prod(shape, dtype=np.int64))
            if name in self._dense:
                done.append(self._assign(self._dense[name], delta, place, has[number]))
                given[self._dense[name].ref()] = has[number] > 0
            place += 8 * has[number] * -(-count * kind.size // 8)
        with tf.control_dependencies(done):
            computed = [each.update(changed, given) for each in self._derived]
        with tf.control_dependencies([*done, *computed]):
            assigned = self.version.assign(version, read_value=False)
        with tf.control_dependencies([assigned]):
            return tf.identity(version)

    def _assign(
        self, variable: tf.Variable, delta: tf.Tensor, place: tf.Tensor, there: tf.Tensor
    ) -> tf.Tensor:
        count = int(np.prod(variable.shape.as_list(), dtype=np.int64))

        def assign() -> tf.Tensor:
            values = _read(delta, place, count, _DECODED[variable.dtype])
            value = tf.cast(tf.reshape(values, variable.shape), variable.dtype)
            with tf.control_dependencies([variable.assign(value, read_value=False)]):
                return tf.constant(True)

        return tf.cond(there > 0, assign, lambda: tf.constant(False))


# A server answers requests while it applies a delta, on the same cores and in the same pools of threads. So
# the graph reads a delta by parts: an op of a whole delta would keep all threads of a pool for milliseconds,
# and the hash table lets requests wait while it inserts.


def _read(delta: tf.Tensor, place: tf.Tensor, count: Any, kind: Any) -> tf.Tensor:
    """Read numbers from a place in bytes."""
    size = tf.as_dtype(kind).size * tf.cast(count, tf.int64)
    return tf.io.decode_raw(tf.strings.substr(delta, place, size), kind)


def _by_parts(count: tf.Tensor, most: int, one: Callable[[tf.Tensor, tf.Tensor], Any]) -> tf.Tensor:
    """Call a function with the beginning and the length of parts, in turn; return ``count`` after them."""

    def some(begin: tf.Tensor) -> list[tf.Tensor]:
        length = tf.minimum(count - begin, most)
        with tf.control_dependencies([one(begin, length)]):
            return [begin + length]

    begin = tf.constant(0, tf.int64)
    return tf.while_loop(lambda begin: begin < count, some, [begin], parallel_iterations=1)[0]


def _checksum(delta: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Compute ``sum_i (2 i + 1) w_i`` modulo 2^64 over all words."""

    def add(begin: tf.Tensor, total: tf.Tensor) -> list[tf.Tensor]:
        length = tf.minimum(count - begin, _WORDS_AT_A_TIME)
        words = _read(delta, 8 * begin, length, tf.int64)
        factors = 2 * (begin + tf.range(length)) + 1
        return [begin + length, total + tf.reduce_sum(factors * words)]

    begin = [tf.constant(0, tf.int64)] * 2
    return tf.while_loop(lambda begin, _: begin < count, add, begin, parallel_iterations=1)[1]


def _remove(
    table: LiveTable, delta: tf.Tensor, place: tf.Tensor, count: tf.Tensor, prefix: tf.Tensor
) -> tf.Tensor:
    """Remove rows, whose ids are at a place in bytes."""

    def some(begin: tf.Tensor, length: tf.Tensor) -> Any:
        return table.remove(_read(delta, place + 8 * begin, length, tf.int64) | prefix)

    return _by_parts(count, _ROWS_AT_A_TIME, some)


def _upsert(
    table: LiveTable, delta: tf.Tensor, place: tf.Tensor, count: tf.Tensor, prefix: tf.Tensor
) -> tf.Tensor:
    """Set rows; at a place in bytes are their ids, and then the rows."""
    form = table.format

    def some(begin: tf.Tensor, length: tf.Tensor) -> Any:
        keys = _read(delta, place + 8 * begin, length, tf.int64) | prefix
        rows = _read(delta, place + 8 * count + 4 * form.width * begin, length * form.width, form.kind)
        return table.upsert(keys, tf.reshape(rows, tf.stack([length, form.width])))

    return _by_parts(count, _ROWS_AT_A_TIME, some)


_ROWS_AT_A_TIME = 256
_WORDS_AT_A_TIME = 8192
_LONGEST = 1 << 40
"""A bound on a delta's words, to keep a damaged size from overflowing."""
_DECODED = {
    tf.float32: tf.float32,
    tf.float64: tf.float64,
    tf.float16: tf.float16,
    tf.bfloat16: tf.bfloat16,
    tf.int32: tf.int32,
    tf.int64: tf.int64,
    tf.uint8: tf.uint8,
    tf.bool: tf.uint8,
}
"""Dtype of a weight -> the dtype as which its bytes are read."""
