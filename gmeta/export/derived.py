"""Values that an export computes from a model: vectors of a catalogue, answers to an empty history.

An exported model holds such a value as a variable, because requests can't compute it anew. If the model takes
deltas, ``apply_delta`` computes the value again from the rows and weights of the new version, under the lock
of deltas, and assigns the variable as a whole: a request reads a value of one version. It computes

* nothing, if the delta changes nothing that the value is computed from;
* the changed items, if the delta has no weight that the value is computed from, and the vector of an item
  depends on no other item. An index finds the items that read a changed row;
* the whole value otherwise.

The export and ``apply_delta`` run the same traced function, on the same number of items at once, because the
last bits of a matrix product can depend on the number of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from gmeta.core.graph import lift_variables
from gmeta.layers import EmbeddingCollection
from gmeta.models import NextItemModel, TwoTower
from gmeta.models.sequence.history_model import HistoryModel
from gmeta.ops.device import freeze
from gmeta.ops.table.portable_tables import LiveTable, weights_change

_ITEMS_AT_A_TIME = 1024
_MULTIPLE = 64  # whole vectors of a CPU, so that no number of a block is computed as a rest


@dataclass(frozen=True, eq=False)
class Derived:
    """A value that an export computes from a model.

    Call it in a signature's function. It returns the value's tensors, as the served version has them.

    Attributes:
      name: The name of its variables.
      compute: Without ``items``, returns a tensor or several. With ``items``, maps numbers of items, int64
        (n,), to a tensor of their vectors (n, ...); it is called on the same n always.
      items: V, the number of items. None: the value isn't one of items.
      collection: The collection from which ``compute`` reads items' rows.
      inputs: Maps numbers of items (n,) to the input of that lookup. None: it isn't known which rows an item
        reads, and if any row of a table changes that ``compute`` reads, all items are computed again.
      alone: Whether the vector of an item has the same bits whatever other items are computed with it, which
        a matrix product doesn't guarantee. False: if one item changes, all are computed again.

    Example:
      ::

        vectors = Derived("item_vectors", model.item_vectors, items=model.items)
        scores = lambda given: tf.matmul(model(given, training=False), vectors()[0], transpose_b=True)
        export_model(model, "serving/1", signatures={"scores": Signature(scores, inputs)})
    """

    name: str
    compute: Callable[..., Any]
    items: int | None = None
    collection: EmbeddingCollection | None = None
    inputs: Callable[[tf.Tensor], Mapping[str, Any]] | None = None
    alone: bool = False

    def __call__(self) -> list[tf.Tensor]:
        """Return the value's tensors."""
        values = _VALUES.get()
        if values is None:  # outside of an export
            every = [] if self.items is None else [tf.range(self.items, dtype=tf.int64)]
            return tf.nest.flatten(self.compute(*every))
        if self not in values:
            with lift_variables():
                values[self] = Value(self)
        return [tf.convert_to_tensor(variable) for variable in values[self].variables]


def of_items(
    name: str, model: NextItemModel | TwoTower, compute: Callable[..., tf.Tensor], *, alone: bool
) -> Derived:
    """Return a value of all items of a model's catalogue; see `Derived`."""
    inputs, collection = model.item_inputs, model.collection
    return Derived(name, compute, items=model.items, collection=collection, inputs=inputs, alone=alone)


def most_popular(model: HistoryModel, k: int, allow: Any = None) -> Derived:
    """Return the answer to a history without items."""
    return Derived("most_popular", lambda: model.catalogue.most_popular(k, allow))


_VALUES: ContextVar[dict[Derived, Value] | None] = ContextVar("derived_values", default=None)


@contextmanager
def derived_values() -> Iterator[dict[Derived, Value]]:
    """Compute each derived value once inside this block, which is inside of `portable_ops`.

    Yields:
      The values that were read.
    """
    values: dict[Derived, Value] = {}
    token = _VALUES.set(values)
    try:
        yield values
    finally:
        _VALUES.reset(token)


class Value:
    """A derived value in an exported model.

    Args:
      derived: What to compute.

    Attributes:
      variables: The variables that hold it.
    """

    def __init__(self, derived: Derived) -> None:
        self._derived = derived
        self._rows = 0  # how many items are computed at once
        if derived.items is not None:
            self._rows = min(_ITEMS_AT_A_TIME, -(-derived.items // _MULTIPLE) * _MULTIPLE)
        specs = [] if derived.items is None else [tf.TensorSpec([self._rows], tf.int64)]
        self._compute = tf.function(
            lambda *numbers: tf.nest.flatten(derived.compute(*numbers)), autograph=False
        ).get_concrete_function(*specs)
        every = [] if derived.items is None else [tf.range(derived.items, dtype=tf.int64)]
        self._evaluate = self._compute
        if derived.items is not None:
            self._evaluate = tf.function(self._in_pieces, autograph=False).get_concrete_function(
                tf.TensorSpec([None], tf.int64)
            )
        self.variables = [
            tf.Variable(each, trainable=False, name=derived.name) for each in self._evaluate(*every)
        ]
        _ = self._readers  # which makes variables

    @property
    def read(self) -> tuple[tf.Variable, ...]:
        """The variables that it is computed from."""
        return tuple(self._evaluate.variables)

    def _in_pieces(self, numbers: tf.Tensor) -> list[tf.Tensor]:
        """Compute vectors of items, the same number at once always."""
        count = tf.size(numbers)
        rest = -count % self._rows
        pieces = tf.reshape(tf.pad(numbers, [[0, rest]]), [-1, self._rows])
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in self._compute.structured_outputs]
        found = tf.map_fn(self._compute, pieces, fn_output_signature=specs, parallel_iterations=1)
        return [tf.reshape(each, tf.concat([[-1], tf.shape(each)[2:]], 0))[:count] for each in found]

    @cached_property
    def _readers(self) -> dict[int, tuple[tf.Variable, tf.Variable]]:
        """Return for copies of tables, by their `id`, the sorted keys that items read, and these items."""
        derived = self._derived
        if derived.inputs is None or derived.collection is None or not weights_change():
            return {}
        every = tf.range(derived.items, dtype=tf.int64)
        given, collection = derived.inputs(every), derived.collection
        owners = {part.name: _owners(given[each.name]) for each in collection.features for part in each.parts}
        found = {}
        keys_of = zip(collection.merged, collection.tables, collection.keys_of(given), strict=True)
        for merged, table, keys in keys_of:
            order = tf.argsort(keys, stable=True)
            items = tf.gather(tf.concat([owners[part.name] for part in merged.features], 0), order)
            found[id(freeze(table, insert=False))] = (
                tf.Variable(tf.gather(keys, order), trainable=False, name=f"{derived.name}/keys"),
                tf.Variable(items, trainable=False, name=f"{derived.name}/readers"),
            )
        return found

    def update(
        self, changed: Sequence[tuple[LiveTable, tf.Tensor]], given: Mapping[Any, tf.Tensor]
    ) -> tf.Tensor:
        """Compute the value again, as far as a delta changes it.

        Args:
          changed: Tables and the keys (n,) whose rows have changed.
          given: Reference of a weight -> whether the delta has it, () bool.

        Returns:
          () bool, after the variables are assigned.
        """
        handles = {id(handle) for handle in self._evaluate.captured_inputs}
        keys = [(table, each) for table, each in changed if id(table.handle) in handles]
        weights = {variable.ref() for variable in self.read}
        anew = [there for weight, there in given.items() if weight in weights]
        anew += [tf.size(each) > 0 for table, each in keys if id(table) not in self._readers]
        whole = tf.reduce_any(tf.stack([tf.constant(False), *anew]))
        if self._derived.items is None:
            return tf.cond(whole, lambda: self._assign(self._evaluate()), lambda: tf.constant(False))
        known = [self._items_of(table, each) for table, each in keys if id(table) in self._readers]
        some, _ = tf.unique(tf.concat([tf.constant([], tf.int64), *known], 0))
        items = self._derived.items
        if not self._derived.alone:
            whole |= tf.size(some) > 0
        numbers = tf.cond(whole, lambda: tf.range(items, dtype=tf.int64), lambda: tf.sort(some))
        return tf.cond(
            tf.size(numbers) > 0, lambda: self._assign(self._replaced(numbers)), lambda: tf.constant(False)
        )

    def _items_of(self, table: LiveTable, keys: tf.Tensor) -> tf.Tensor:
        """Return the items that read keys of a table."""
        known, items = (tf.convert_to_tensor(each) for each in self._readers[id(table)])
        first, last = (tf.searchsorted(known, keys, side, tf.int64) for side in ("left", "right"))
        return tf.gather(items, tf.ragged.range(first, last).flat_values)

    def _replaced(self, numbers: tf.Tensor) -> list[tf.Tensor]:
        """Return the value with the vectors of some items computed again."""
        fresh = self._evaluate(numbers)
        places = numbers[:, tf.newaxis]

        def replace() -> list[tf.Tensor]:
            return [
                tf.tensor_scatter_nd_update(variable.read_value(), places, rows)
                for variable, rows in zip(self.variables, fresh, strict=True)
            ]

        found = tf.cond(tf.size(numbers) == self._derived.items, lambda: list(fresh), replace)
        return tf.nest.flatten(found)

    def _assign(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        pairs = zip(self.variables, values, strict=True)
        with tf.control_dependencies([variable.assign(each, read_value=False) for variable, each in pairs]):
            return tf.constant(True)


def _owners(ids: Any) -> tf.Tensor:
    """Return for each id the place of the sample that has it."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.value_rowids()
    count = tf.shape(ids, tf.int64)[0]
    return tf.repeat(tf.range(count), tf.size(ids, tf.int64) // tf.maximum(count, 1))
