"""Tracing without gmeta's ops, so that a saved graph runs wherever TensorFlow runs.

Inside `portable_ops`, each op of a prediction uses its form in plain TensorFlow, and each table is read from
a `FrozenTable`, a copy of its current state. This applies to all code called inside, including layers and
models. A model is therefore exported by retracing it, without special export code.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.graph import lift_variables
from gmeta.core.row_formats import ABSENT, LARGEST_SCALE, MOST, TINY, RowDtype, RowFormat
from gmeta.initializers import portable_initial_rows, portable_round_to_float16
from gmeta.ops.device import ACTIVE, portable_forms
from gmeta.ops.table.finite import refuse_bad_rows
from gmeta.ops.table.hash_table import HashTable

# A read-only copy of a table in plain TensorFlow ops, for serving without gmeta's ops.
#
# Keys and rows are variables, so they are stored in the SavedModel's variable files: a graph holds at most 2
# GB of constants, but a variable can be as large as memory. A static hash table maps a key to its row's
# number; it is filled from the keys when the model is loaded.

UnknownRows = Callable[[tf.Tensor], tf.Tensor]
"""Function from (n,) keys that a table doesn't hold to the (n, dim) rows that a lookup of them returns."""

NO_ROW = -1
"""The number of the row of a key that has none."""


class RowNumbers(tf.saved_model.experimental.TrackableResource):
    """Static hash table from the values of a variable to their positions; -1 for other keys.

    It isn't a ``tf.lookup.StaticHashTable``, whose initializers write the keys into the graph. Unlike that
    class, it has no shared name while it serves in Python: a named table stays in memory until the process
    ends. Only the graph that TensorFlow Serving runs finds it by name, because each request runs the op that
    creates the table; a session's tables end with it.
    """

    def __init__(self, keys: tf.Variable) -> None:
        super().__init__(device="CPU")
        self._variable = keys
        self._track_trackable(keys, "keys")  # the loaded model needs it
        self._shared_name = ""
        with tf.init_scope():
            _ = self.resource_handle
            self._initialize()

    def _create_resource(self) -> tf.Tensor:
        if self._shared_name:
            return tf.raw_ops.HashTableV2(
                key_dtype=tf.int64, value_dtype=tf.int64, shared_name=self._shared_name
            )
        return tf.raw_ops.AnonymousHashTable(key_dtype=tf.int64, value_dtype=tf.int64)

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        self._shared_name = f"gmeta_frozen_{uuid.uuid4().hex}"
        try:
            return super()._export_to_saved_model_graph(*args, **kwargs)
        finally:
            self._shared_name = ""

    def _initialize(self) -> None:
        """Fill the table. A SavedModel's loader calls it after restoring the variables."""
        keys = self._variable.read_value()
        values = tf.range(tf.size(keys, tf.int64), dtype=tf.int64)
        tf.raw_ops.LookupTableImportV2(table_handle=self.resource_handle, keys=keys, values=values)

    def __call__(self, keys: tf.Tensor) -> tf.Tensor:
        """Look up the positions of keys, int64 of the same shape."""
        found = tf.raw_ops.LookupTableFindV2(
            table_handle=self.resource_handle, keys=keys, default_value=tf.constant(NO_ROW, tf.int64)
        )
        return tf.ensure_shape(found, keys.shape)


def _all_absent(keys: tf.Tensor) -> tf.Tensor:
    return tf.fill(tf.shape(keys), tf.constant(NO_ROW, tf.int64))


class FrozenTable(tf.Module):
    """Constant rows by key, in plain TensorFlow ops.

    Args:
      keys: (n,) int64, distinct.
      rows: (n, dim) float32, finite.
      unknown: Computes the rows of keys that the table doesn't contain; called with only those keys.
      dtype: How rows are held; see `RowFormat`.

    Example:
      >>> table = FrozenTable(
      ...     keys=tf.constant([7, 3], tf.int64),
      ...     rows=tf.constant([[1.0], [2.0]]),
      ...     unknown=lambda keys: tf.zeros([tf.size(keys), 1]),
      ... )
      >>> table.lookup_keys(tf.constant([3, 5, 7], tf.int64)).numpy()
      array([[2.], [0.], [1.]], dtype=float32)
    """

    def __init__(
        self, keys: tf.Tensor, rows: tf.Tensor, unknown: UnknownRows, dtype: RowDtype = "float32"
    ) -> None:
        super().__init__()
        self.format = RowFormat(dtype, int(rows.shape[1]))
        self._unknown = unknown
        self._keys = tf.Variable(keys, trainable=False, name="keys")
        self._rows = tf.Variable(_encode(self.format, rows), trainable=False, name="rows")
        # TensorFlow can't fill a static table without entries.
        self._index = RowNumbers(self._keys) if self._keys.shape[0] else _all_absent

    @property
    def size(self) -> int:
        """Number of keys."""
        return int(self._keys.shape[0])

    def contains(self, keys: tf.Tensor) -> tf.Tensor:
        """Return which of (n,) int64 keys the table holds, (n,) bool."""
        return tf.not_equal(self._index(keys), NO_ROW)

    def lookup_keys(self, keys: tf.Tensor) -> tf.Tensor:
        """Look up the (n, dim) rows of (n,) int64 keys."""

        def read(numbers: tf.Tensor) -> tf.Tensor:
            return decode_rows(self.format, tf.gather(self._rows, numbers))

        rows = rows_at(self._index(keys), keys, read, self._unknown)
        return tf.ensure_shape(rows, [None, self.format.dim])


def _encode(form: RowFormat, rows: tf.Tensor) -> Any:
    return rows if form.dtype == "float32" else form.encode(np.asarray(rows))


def decode_rows(form: RowFormat, words: tf.Tensor) -> tf.Tensor:
    """Compute the (n, dim) float32 rows of (n, width) words."""
    if form.dtype == "float32":
        return words
    if form.dtype == "bfloat16":
        return _numbers(form, words, tf.bfloat16)
    return _numbers(form, words[:, 1:], tf.int8) * tf.bitcast(words[:, :1], tf.float32)


def bytes_of_words(words: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
    """Return the first bytes of each row of words, little endian, (n,) string.

    TensorFlow has ``decode_raw`` but not its reverse. ``encode_proto`` writes floats as their four bytes, so
    words are given as floats of the same bits, behind a tag that is cut off.

    Args:
      words: (n, width) int32.
      sizes: (n,) int64, how many bytes of each row to return.
    """
    counts = (sizes + 3) // 4
    message = tf.raw_ops.EncodeProto(
        sizes=tf.cast(counts, tf.int32)[:, tf.newaxis],
        values=[tf.bitcast(words, tf.float32)],
        field_names=["float_val"],
        message_type="tensorflow.TensorProto",
    )
    return tf.strings.substr(message, -4 * counts, sizes)  # from the end


def pack_rows(form: RowFormat, rows: tf.Tensor) -> tf.Tensor:
    """Compute the (n, width) words of (n, dim) finite float32 rows, as `RowFormat.encode` does."""
    if form.dtype == "float32":
        return rows
    if form.dtype == "bfloat16":
        most = tf.constant(tf.bfloat16.max, tf.float32)
        return _words(form, tf.cast(tf.clip_by_value(rows, -most, most), tf.bfloat16), form.width)
    largest = tf.reduce_max(tf.abs(rows), axis=1, keepdims=True)
    scales = tf.minimum(largest / MOST, LARGEST_SCALE)
    scales = tf.where(scales < TINY, 0.0, scales)
    numbers = tf.round(tf.math.divide_no_nan(rows, scales))
    quantised = tf.cast(tf.clip_by_value(numbers, -MOST, MOST), tf.int8)
    return tf.concat([tf.bitcast(scales, tf.int32), _words(form, quantised, form.width - 1)], axis=1)


def _words(form: RowFormat, numbers: tf.Tensor, width: int) -> tf.Tensor:
    """Pack numbers of less than 32 bits."""
    each = 4 // numbers.dtype.size
    padded = tf.pad(numbers, [[0, 0], [0, width * each - form.dim]])
    return tf.bitcast(tf.reshape(padded, [-1, width, each]), tf.int32)


def _numbers(form: RowFormat, words: tf.Tensor, kind: tf.DType) -> tf.Tensor:
    numbers = tf.reshape(tf.bitcast(words, kind), [-1, words.shape[1] * 4 // kind.size])
    return tf.cast(numbers[:, : form.dim], tf.float32)


def rows_at(
    numbers: tf.Tensor, keys: tf.Tensor, read: Callable[[tf.Tensor], tf.Tensor], unknown: UnknownRows
) -> tf.Tensor:
    """Read rows by their numbers, (n,) int64; keys whose number is `NO_ROW` read their unknown rows."""
    part = tf.cast(tf.equal(numbers, NO_ROW), tf.int32)
    found, _ = tf.dynamic_partition(numbers, part, 2)
    _, absent = tf.dynamic_partition(keys, part, 2)
    places = tf.dynamic_partition(tf.range(tf.size(keys)), part, 2)
    return tf.dynamic_stitch(places, [read(found), unknown(absent)])


# A copy whose rows a running server replaces, for exports that accept deltas.


class LiveRows(tf.saved_model.experimental.TrackableResource):
    """Mutable hash table from int64 keys to rows, of TensorFlow's own ops; `RowNumbers` explains its names.

    A checkpoint of it stores its content, so a SavedModel needs no additional variable.

    Args:
      form: The format of the rows.
    """

    def __init__(self, form: RowFormat) -> None:
        super().__init__(device="CPU")
        self._form = form
        self._shared_name = ""
        with tf.init_scope():
            _ = self.resource_handle

    def _create_resource(self) -> tf.Tensor:
        kinds = {
            "key_dtype": tf.int64,
            "value_dtype": self._form.kind,
            "value_shape": [self._form.width],
        }
        if self._shared_name:
            return tf.raw_ops.MutableHashTableOfTensorsV2(shared_name=self._shared_name, **kinds)
        return tf.raw_ops.AnonymousMutableHashTableOfTensors(**kinds)

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        self._shared_name = f"gmeta_live_{uuid.uuid4().hex}"
        try:
            return super()._export_to_saved_model_graph(*args, **kwargs)
        finally:
            self._shared_name = ""

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        keys, rows = tf.raw_ops.LookupTableExportV2(
            table_handle=self.resource_handle, Tkeys=tf.int64, Tvalues=self._form.kind
        )
        return {"keys": keys, "rows": rows}

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        return tf.raw_ops.LookupTableImportV2(
            table_handle=self.resource_handle,
            keys=restored_tensors["keys"],
            values=restored_tensors["rows"],
        )


class LiveTable(tf.Module):
    """Rows by key that `upsert` and `remove` change, in plain TensorFlow ops.

    Lookups return the same as a `FrozenTable` of the same rows. Rows must be finite: NaN marks a missing key
    in the hash table's results.

    Args:
      keys: (n,) int64, distinct.
      rows: (n, dim) float32.
      unknown: As for `FrozenTable`.
      dtype: As for `FrozenTable`.

    Example:
      >>> table = LiveTable(
      ...     keys=tf.constant([7], tf.int64),
      ...     rows=tf.constant([[1.0]]),
      ...     unknown=lambda keys: tf.zeros([tf.size(keys), 1]),
      ... )
      >>> _ = table.upsert(tf.constant([3], tf.int64), tf.constant([[2.0]]))
      >>> table.lookup_keys(tf.constant([3, 5, 7], tf.int64)).numpy().tolist()
      [[2.0], [0.0], [1.0]]
    """

    def __init__(
        self, keys: tf.Tensor, rows: tf.Tensor, unknown: UnknownRows, dtype: RowDtype = "float32"
    ) -> None:
        super().__init__()
        self.format = RowFormat(dtype, int(rows.shape[1]))
        self._unknown = unknown
        self._rows = LiveRows(self.format)
        self._absent = np.array(ABSENT, np.int32).view(self.format.kind)[()]
        self.upsert(keys, _encode(self.format, rows))

    @property
    def size(self) -> int:
        """Number of keys."""
        return int(tf.raw_ops.LookupTableSizeV2(table_handle=self._rows.resource_handle))

    @property
    def handle(self) -> tf.Tensor:
        """The hash table's resource handle, which graphs that read it capture."""
        return self._rows.resource_handle

    def upsert(self, keys: tf.Tensor, rows: tf.Tensor) -> Any:
        """Set the rows of (n,) int64 keys, (n, width) words in the table's format."""
        return tf.raw_ops.LookupTableInsertV2(table_handle=self._rows.resource_handle, keys=keys, values=rows)

    def remove(self, keys: tf.Tensor) -> Any:
        """Remove (n,) int64 keys; missing keys are skipped."""
        return tf.raw_ops.LookupTableRemoveV2(table_handle=self._rows.resource_handle, keys=keys)

    def _find(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        found = tf.raw_ops.LookupTableFindV2(
            table_handle=self._rows.resource_handle,
            keys=keys,
            default_value=tf.fill([self.format.width], self._absent),
        )
        found = tf.ensure_shape(found, [None, self.format.width])
        first = found[:, 0]
        return found, tf.math.is_nan(first) if first.dtype.is_floating else tf.equal(first, self._absent)

    def contains(self, keys: tf.Tensor) -> tf.Tensor:
        """Return which of (n,) int64 keys the table holds, (n,) bool."""
        return tf.logical_not(self._find(keys)[1])

    def lookup_keys(self, keys: tf.Tensor) -> tf.Tensor:
        """Look up the (n, dim) rows of (n,) int64 keys."""
        words, absent = self._find(keys)
        places = tf.where(absent)
        unknown = self._unknown(tf.gather_nd(keys, places))
        rows = tf.tensor_scatter_nd_update(decode_rows(self.format, words), places, unknown)
        return tf.ensure_shape(rows, [None, self.format.dim])


External = Callable[[HashTable, UnknownRows], Any]
"""Function that returns what to read instead of a copy of a table, with `FrozenTable.contains` and
`FrozenTable.lookup_keys`; None: a copy."""


Rows = Callable[[HashTable], tuple[Any, Any]]
"""Function that returns a table's (n,) int64 keys and (n, dim) float32 rows."""


def own_rows(table: HashTable) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the rows that this process has."""
    records = table.export(with_slots=False)  # the rows' tensor becomes the variable's own
    return records.keys, records.rows


def no_external_rows(table: HashTable, unknown: UnknownRows) -> None:
    """Return None: the table is copied."""


class PortableTables:
    """Tables that a portable graph reads, each copied on first use.

    Args:
      unknown: Table -> the rows of keys that it doesn't hold.
      live: Whether the copies can be changed.
      dtype: How the copies hold rows.
      external: What to read instead of a copy.
      rows: Returns the rows to copy.
    """

    def __init__(
        self,
        unknown: Callable[[HashTable], UnknownRows],
        live: bool = False,
        dtype: RowDtype = "float32",
        external: External = no_external_rows,
        rows: Rows = own_rows,
    ) -> None:
        self._unknown, self.live, self._dtype, self._external = unknown, live, dtype, external
        self._rows = rows
        self._frozen: dict[int, tuple[HashTable, Any]] = {}

    @property
    def copies(self) -> list[tuple[HashTable, Any]]:
        """The tables that were read, each with its copy."""
        return [*self._frozen.values()]

    def freeze(self, table: HashTable) -> Any:
        """Return the table's copy: a `FrozenTable`, a `LiveTable`, or what ``external`` returns.

        Raises:
          NotFiniteError: A row holds NaN or infinity; the message names its table and id.
        """
        if id(table) not in self._frozen:
            unknown = self._unknown(table)
            copy = self._external(table, unknown)
            if copy is not None:
                self._frozen[id(table)] = table, copy
                return copy
            with lift_variables():  # not parts of the graph being traced
                keys, rows = self._rows(table)
                refuse_bad_rows(table, keys, rows)
                kind = LiveTable if self.live else FrozenTable
                copy = kind(keys, rows, unknown, self._dtype)
            self._frozen[id(table)] = table, copy
        return self._frozen[id(table)][1]

    def __iter__(self) -> Iterator[Any]:
        return (copy for _, copy in self._frozen.values())


def weights_change() -> bool:
    """Return whether the graph being traced is for a server that accepts new weights (`LiveTable`)."""
    tables = ACTIVE.get()
    return isinstance(tables, PortableTables) and tables.live


def initial_rows_of(table: HashTable) -> UnknownRows:
    """Return the function that computes initial rows of missing keys like the table."""

    def rows(keys: tf.Tensor) -> tf.Tensor:
        initial = portable_initial_rows(table.initializer, table.seed, keys, table.dim)
        return initial if table.precision is None else portable_round_to_float16(initial)

    return rows


@contextmanager
def portable_ops(
    unknown: Callable[[HashTable], UnknownRows] = initial_rows_of,
    *,
    live: bool = False,
    dtype: RowDtype = "float32",
    external: External = no_external_rows,
    rows: Rows = own_rows,
) -> Iterator[PortableTables]:
    """Make gmeta's ops use their form in plain TensorFlow, in this thread and inside this block.

    Lookups that would insert are refused. Ops without such a form, such as updates, don't change.

    Args:
      unknown: Table -> the rows of keys that it doesn't hold.
      live: Whether the tables' copies can be changed (`LiveTable`).
      dtype: How the copies hold rows (`RowFormat`).
      external: What to read instead of a copy of a table.
      rows: Returns a table's rows to copy.

    Yields:
      The tables that were read; an exported object must keep them.

    Example:
      >>> table = HashTable(1, initializer=Constant(2.0))
      >>> with portable_ops() as tables:
      ...     rows = tf.function(lambda ids: table.lookup(ids, insert=False).rows)
      ...     graph = rows.get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
      >>> [op.type for op in graph.get_operations() if "Gmeta" in op.type]
      []
    """
    tables = PortableTables(unknown, live, dtype, external, rows)
    with portable_forms(tables):
        yield tables
