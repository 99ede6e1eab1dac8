"""Signatures that take embedding rows as inputs, for tables larger than a server.

For each signature ``name`` that reads external tables, the SavedModel has two:

* ``name_ids`` takes the same inputs. For each external table, it returns ``<table>_ids``, int64 (k,): the
  distinct ids whose rows ``name`` reads.
* ``name`` also takes ``<table>_ids`` and ``<table>_rows``, string (k,): the bytes that a store holds for each
  id (`gmeta.export.row_stores` describes them), or the empty string if it holds none. Such an id reads the
  row that an untrained id of an export without external tables reads.

The ids are found by tracing the signature with the initial rows of all ids, and noting the keys that it looks
up. So they may not depend on rows.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.merged_tables import NamedTable, find_table, tables_by_full_name
from gmeta.core.row_formats import RowDtype, RowFormat
from gmeta.export.delta_signatures import tables_of
from gmeta.export.row_stores import DTYPES, HEAD
from gmeta.export.signature import Signature, wire_names
from gmeta.ops import HashTable
from gmeta.ops.table.portable_tables import NO_ROW, UnknownRows, decode_rows, rows_at

External: TypeAlias = "Literal['all'] | Collection[str]"
"""Names of the tables whose rows are external; ``"all"``: every table of the model."""

Trace: TypeAlias = Callable[[str, Signature], Any]


def external_names(model: tf.keras.Model, external: External) -> dict[str, str]:
    """Name the external tables.

    Args:
      model: The model.
      external: As for `gmeta.export.export_model`.

    Returns:
      Full name of a table -> its name in stores and signatures: letters, digits and ``_``.

    Raises:
      ConfigError: There is no such table, or it shares a physical table with one that isn't external.
    """
    physical = {table.name: table.merged_keys for table in tables_of(model)}
    named = tables_by_full_name(physical)
    if isinstance(external, str) and external != "all":
        raise ConfigError(f"external must be 'all' or a list of tables, got {external!r}")
    chosen = [*named.values()]
    if external != "all":
        chosen = [find_table(name, physical, model.name) for name in external]
    for each in chosen:
        if others := [other.name for other in named.values() if _shares(other, each) and other not in chosen]:
            raise ConfigError(
                f"table {each.name!r} can't be external alone: its rows are in one table with those of "
                f"{', '.join(others)}. Name these too, or give {each.name!r} another width or policy"
            )
    counts = Counter(each.name for each in named.values())
    short = {full: each.name if counts[each.name] == 1 else full for full, each in named.items()}
    sent = wire_names(short.values())
    return {full: sent[short[full]] for full, each in named.items() if each in chosen}


def _shares(one: NamedTable, other: NamedTable) -> bool:
    return one.physical == other.physical


class ExternalRows:
    """The external tables of an export.

    Args:
      model: The model.
      external: As for `gmeta.export.export_model`.
      dtype: The dtype of rows in the store.
      features: The names of its features, which inputs for rows may not have.
    """

    def __init__(
        self, model: tf.keras.Model, external: External, dtype: RowDtype, features: Collection[str]
    ) -> None:
        self._model, self._dtype, self._features = model.name, dtype, features
        self.names = external_names(model, external)
        found = tables_by_full_name({table.name: table.merged_keys for table in tables_of(model)})
        self._parts: dict[str, dict[str, NamedTable]] = {}  # physical table -> its tables, by sent name
        for full, name in self.names.items():
            self._parts.setdefault(found[full].physical, {})[name] = found[full]
        self._own = {id(table) for table in tables_of(model)}
        self.request: Wanted | Brought | None = None

    def copy(self, table: HashTable, unknown: UnknownRows) -> ExternalTable | None:
        """Return what a portable graph reads instead of a table; None if it isn't external."""
        if table.name not in self._parts or id(table) not in self._own:
            return None
        return ExternalTable(self, table.name, table.dim, unknown)

    def split(self, signatures: Mapping[str, Signature], trace: Trace) -> dict[str, Signature]:
        """Replace each signature that reads external tables by one that takes rows, and one of their ids.

        Args:
          signatures: Name -> signature.
          trace: Traces a signature of a name.

        Raises:
          ConfigError: Ids depend on rows, rows are read where their ids can't be returned, or a name is that
            of something else.
        """
        found: dict[str, Signature] = {}
        for name, signature in signatures.items():
            dims: dict[str, int] = {}
            asks = Signature(functools.partial(self._ids, signature, dims), signature.inputs)
            trace(f"{name}_ids", asks)  # which notes what it reads
            found[name] = self._takes_rows(signature, dims) if dims else signature
            if dims:
                if f"{name}_ids" in signatures:
                    raise ConfigError(f"signature '{name}_ids' is that of ids: name yours otherwise")
                found[f"{name}_ids"] = asks
        return found

    def _ids(
        self, signature: Signature, dims: dict[str, int], inputs: dict[str, Any]
    ) -> dict[str, tf.Tensor]:
        self.request = wanted = Wanted(tf.compat.v1.get_default_graph())
        try:
            signature.function(inputs)
        finally:
            self.request = None
        dims.update(wanted.dims)
        return wanted.ids(self._parts)

    def _takes_rows(self, signature: Signature, dims: Mapping[str, int]) -> Signature:
        parts = {physical: self._parts[physical] for physical in dims}
        formats = {physical: RowFormat(self._dtype, dim) for physical, dim in dims.items()}
        rows = _inputs(parts)
        if taken := sorted(rows.keys() & {*signature.inputs, *self._features}):
            raise ConfigError(
                f"{self._model}: the model's input {taken[0]!r} has the name of the input of a table's rows: "
                "prepare the data with another name of this column"
            )

        def answer(inputs: dict[str, Any]) -> Any:
            self.request = Brought(parts, formats, inputs)
            try:
                return signature.function({key: inputs[key] for key in signature.inputs})
            finally:
                self.request = None

        return Signature(answer, {**signature.inputs, **rows})


def _inputs(parts: Mapping[str, Mapping[str, NamedTable]]) -> dict[str, tf.TypeSpec]:
    names = [name for tables in parts.values() for name in tables]
    kinds = {"ids": tf.int64, "rows": tf.string}
    return {f"{name}_{kind}": tf.TensorSpec([None], dtype) for name in names for kind, dtype in kinds.items()}


class ExternalTable(tf.Module):
    """A table of which each request brings the rows that it reads.

    Args:
      of: The request.
      table: The physical table's name.
      dim: The width of a row.
      unknown: As for `gmeta.ops.table.portable_tables.FrozenTable`.
    """

    size = 0
    """Number of rows in the exported model."""

    def __init__(self, of: ExternalRows, table: str, dim: int, unknown: UnknownRows) -> None:
        super().__init__()
        self._of, self.table, self.dim, self.unknown = of, table, dim, unknown

    def _request(self) -> Wanted | Brought:
        if self._of.request is None or tf.executing_eagerly():
            raise ConfigError(
                f"table {self.table!r} can't be external: the export reads its rows, to compute values of "
                "the whole catalogue. Leave it out of external="
            )
        return self._of.request

    def contains(self, keys: tf.Tensor) -> tf.Tensor:
        """Return which of (n,) int64 keys the store holds, (n,) bool."""
        return self._request().contains(self, keys)

    def lookup_keys(self, keys: tf.Tensor) -> tf.Tensor:
        """Look up the (n, dim) rows of (n,) int64 keys."""
        return tf.ensure_shape(self._request().lookup(self, keys), [None, self.dim])


class Wanted:
    """Notes the keys that a graph looks up.

    Args:
      graph: The graph.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self._graph = graph
        self._keys: dict[str, list[tf.Tensor]] = {}
        self.dims: dict[str, int] = {}
        self._answers: set[tf.Operation] = set()

    def lookup(self, table: ExternalTable, keys: tf.Tensor) -> tf.Tensor:
        """Note keys, and return their initial rows."""
        return self._note(table, keys, table.unknown(keys))

    def contains(self, table: ExternalTable, keys: tf.Tensor) -> tf.Tensor:
        """Note keys, and return False for each."""
        return self._note(table, keys, tf.zeros_like(keys, tf.bool))

    def _note(self, table: ExternalTable, keys: tf.Tensor, answer: tf.Tensor) -> tf.Tensor:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ConfigError(
                f"table {table.table!r} can't be external: its rows are looked up inside a loop, a condition "
                "or a tf.function, or to compute values of the whole catalogue. Look them up outside of it, "
                "or leave the table out of external="
            )
        self.dims[table.table] = table.dim
        self._keys.setdefault(table.table, []).append(keys)
        answer = tf.identity(answer)
        self._answers.add(answer.op)
        return answer

    def ids(self, parts: Mapping[str, Mapping[str, NamedTable]]) -> dict[str, tf.Tensor]:
        """Return ``<table>_ids`` of each table that was read.

        Args:
          parts: Physical table -> the tables in it, by the names that clients use.
        """
        found = {}
        for table, noted in self._keys.items():
            if self._depends(noted):
                raise ConfigError(
                    f"table {table!r} can't be external: which of its ids are read depends on rows. Leave it "
                    "out of external="
                )
            keys, _ = tf.unique(tf.concat(noted, 0))
            for name, named in parts[table].items():
                own = keys
                if named.merged is not None:
                    most = tf.constant((1 << named.merged.id_bits) - 1, tf.int64)
                    is_own = tf.equal(tf.bitwise.bitwise_and(keys, tf.bitwise.invert(most)), named.prefix)
                    own = tf.bitwise.bitwise_and(tf.boolean_mask(keys, is_own), most)
                found[f"{name}_ids"] = own
        return found

    def _depends(self, tensors: list[tf.Tensor]) -> bool:
        """Return whether tensors are computed from rows."""
        todo, seen = [tensor.op for tensor in tensors], set()
        while todo:
            op = todo.pop()
            if op in self._answers:
                return True
            if op not in seen:
                seen.add(op)
                todo += [each.op for each in op.inputs]
        return False


class Brought:
    """The rows that a request brings.

    Args:
      parts: Physical table -> the tables in it, by the names that clients use.
      formats: Physical table -> the format of its rows.
      inputs: The request's inputs.
    """

    def __init__(
        self,
        parts: Mapping[str, Mapping[str, NamedTable]],
        formats: Mapping[str, RowFormat],
        inputs: Mapping[str, tf.Tensor],
    ) -> None:
        self._formats = formats
        self._given = {table: _given(of, formats[table], inputs) for table, of in parts.items()}

    def _places(self, table: ExternalTable, keys: tf.Tensor) -> tf.Tensor:
        given, numbers, _ = self._given[table.table]
        count = tf.size(given, tf.int64)
        _, places = tf.unique(tf.concat([given, keys], 0), out_idx=tf.int64)
        checks = [
            tf.debugging.Assert(
                tf.reduce_all(tf.equal(places[:count], tf.range(count))),
                [f"the request has an id of {table.table} twice: send the ids that <signature>_ids returns"],
            ),
            tf.debugging.Assert(
                tf.reduce_all(places[count:] < count),
                [f"the request lacks ids of {table.table}: send those that <signature>_ids returns"],
            ),
        ]  # fmt: skip
        with tf.control_dependencies(checks):
            return tf.gather(numbers, places[count:])

    def lookup(self, table: ExternalTable, keys: tf.Tensor) -> tf.Tensor:
        """Return the rows of keys."""
        form, words = self._formats[table.table], self._given[table.table][2]

        def read(numbers: tf.Tensor) -> tf.Tensor:
            return decode_rows(form, tf.gather(words, numbers))

        return rows_at(self._places(table, keys), keys, read, table.unknown)

    def contains(self, table: ExternalTable, keys: tf.Tensor) -> tf.Tensor:
        """Return which keys the store holds."""
        return tf.not_equal(self._places(table, keys), NO_ROW)


def _given(
    tables: Mapping[str, NamedTable], form: RowFormat, inputs: Mapping[str, tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return the keys of a physical table in a request, the number of each key's row, and the rows' words."""
    keys, values = [], []
    for name, named in tables.items():
        ids, rows = inputs[f"{name}_ids"], inputs[f"{name}_rows"]
        same = tf.debugging.Assert(
            tf.equal(tf.size(ids), tf.size(rows)),
            [f"{name}_rows needs a value for each of {name}_ids, the empty string where there is no row"],
        )
        with tf.control_dependencies([same]):
            keys.append(tf.bitwise.bitwise_or(ids, tf.constant(named.prefix, tf.int64)))
        values.append(rows)
    stored = tf.concat(values, 0)
    found = tf.not_equal(tf.strings.length(stored), 0)
    stored = tf.boolean_mask(stored, found)
    names = " and ".join(f"{name}_rows" for name in tables)
    whole = tf.debugging.Assert(
        tf.reduce_all(tf.equal(tf.strings.length(stored), HEAD + 4 * form.width)),
        [f"{names} must be the bytes that gmeta deliver stored, {HEAD + 4 * form.width} a row"],
    )
    with tf.control_dependencies([whole]):
        words = tf.reshape(tf.io.decode_raw(tf.identity(stored), tf.int32), [-1, HEAD // 4 + form.width])
    kind = tf.debugging.Assert(
        tf.reduce_all(tf.equal(tf.bitwise.bitwise_and(words[:, 0], 0xFF), DTYPES[form.dtype])),
        [f"{names} must be rows of {form.dtype}, as those of the publisher that wrote this model"],
    )
    with tf.control_dependencies([kind]):
        rows = tf.bitcast(words[:, HEAD // 4 :], form.kind)
    numbers = tf.where(found, tf.cumsum(tf.cast(found, tf.int64)) - 1, NO_ROW)
    return tf.concat(keys, 0), numbers, rows
