"""Sums the gradients of a frozen window's rows, and sends each sum once to the row's owner.

The gradients of a class of keys (`gmeta.layers.exchange.window.keys`) are summed in the order of
micro-batches, so a step is the same in every run. It equals the undivided step up to the rounding of sums.

A key may be without a gradient in some micro-batches, or in all, and then its row must stay as it is. As in
`gmeta.layers.exchange.pieces`, a row of negative zeros stands for none; the sum of two is one again.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from gmeta.core import collectives
from gmeta.layers.exchange.ahead import Fetched
from gmeta.layers.exchange.pieces import OwnedGradient, by_key, exchange_gradients, present
from gmeta.layers.exchange.recorded_lookups import TableGradient, by_table
from gmeta.layers.exchange.window.keys import KeyClass, WindowKeys, key_classes

_Table = tuple[int, int]  # the numbers of a lookup, and of one of its tables


def leaves_after(keys: KeyClass) -> int:
    """Return the micro-batch after which the gradients of a class go to the rows' owners."""
    return keys.last


class WindowGradients:
    """The gradients of the rows of a step's lookups.

    Args:
      lookups: What is known of each lookup.
      micro_batches: Their number.
    """

    def __init__(self, lookups: Sequence[Fetched], micro_batches: int) -> None:
        self._fetches = [each.fetch for each in lookups]
        self._keys: list[WindowKeys] = [each.requested for each in lookups]
        self._classes = key_classes(micro_batches)
        self._sums: dict[tuple[int, int, int], tf.Tensor] = {}  # by lookup, table and class
        self._slices: dict[_Table, bool] = {}  # whether keys may be without a gradient
        self._own: dict[_Table, list[OwnedGradient]] = {}
        self._arrived: dict[_Table, list[OwnedGradient]] = {}

    @property
    def arrived(self) -> list[tf.Tensor]:
        """All gradients that have come from other ranks."""
        return [each.values for parts in self._arrived.values() for each in parts]

    def add(
        self,
        micro_batch: int,
        gradients: Sequence[tuple[_Table, tf.Tensor | tf.IndexedSlices | None]],
    ) -> None:
        """Add a micro-batch's gradients of the rows that it was handed.

        Args:
          micro_batch: The micro-batch.
          gradients: Tables of lookups, and the sums over samples of their rows' gradients.
        """
        open_ = [index for index, each in enumerate(self._classes) if each.is_open(micro_batch)]
        for table, gradient in gradients:
            lookup, place = table
            slices = isinstance(gradient, tf.IndexedSlices) or self._slices.get(table, False)
            self._slices[table] = slices
            if gradient is None:
                continue
            keys = self._keys[lookup].keys[place]
            parts = tf.split(by_key(gradient), [tf.size(keys[each]) for each in open_], num=len(open_))
            for each, part in zip(open_, parts, strict=True):
                before = self._sums.get((lookup, place, each))
                self._sums[lookup, place, each] = part if before is None else before + part

    def send(self, micro_batch: int) -> None:
        """Send the sums that a micro-batch is the last to add to; one exchange carries all lookups."""
        chosen = [index for index, each in enumerate(self._classes) if leaves_after(each) == micro_batch]
        for table in self._slices:
            lookup, place = table
            keys = self._keys[lookup].keys[place]
            for each in chosen:
                if (lookup, place, each) in self._sums:
                    own = OwnedGradient(keys[each], self._sums[lookup, place, each])
                    self._own.setdefault(table, []).append(own)
        if collectives.world().size == 1:
            return
        lookups = dict.fromkeys(lookup for lookup, _ in self._own)
        for wire_dtype in dict.fromkeys(self._fetches[n].wire_dtype for n in lookups):
            alike = [n for n in lookups if self._fetches[n].wire_dtype == wire_dtype]
            columns = [[(n, t, c) for t in range(len(self._keys[n].keys)) for c in chosen] for n in alike]
            owned = exchange_gradients(
                [self._keys[n].exchange_of(chosen) for n in alike],
                [[self._sums.get(column) for column in of_lookup] for of_lookup in columns],
                wire_dtype=wire_dtype,
                name=f"step/{micro_batch}",
            )
            for of_lookup, came in zip(columns, owned, strict=True):
                for (n, t, _), part in zip(of_lookup, came, strict=True):
                    if part is not None:
                        self._arrived.setdefault((n, t), []).append(part)

    def sums(self) -> list[tf.Tensor]:
        """Return the sums of this rank's gradients, (u, dim) for each table of each lookup that has any."""
        return [tf.concat([each.values for each in parts], axis=0) for parts in self._own.values()]

    def by_table(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[TableGradient]:
        """Group gradients by physical table; see `FrozenWindow.by_table`."""
        alone = collectives.world().size == 1
        given = dict(zip(self._own, gradients, strict=True))
        found: list[tuple[_Table, OwnedGradient | None]] = []
        for table, slices in self._slices.items():
            parts = (self._own if alone else self._arrived).get(table)
            came = None
            if parts is not None:
                keys = tf.concat([each.keys for each in parts], axis=0)
                with tf.control_dependencies(list(gradients)):
                    values = given[table] if alone else tf.concat([each.values for each in parts], axis=0)
                came = OwnedGradient(keys, values)
                came = present(came) if slices else came
            found.append((table, came))
        return by_table((self._fetches[lookup].tables[place], part) for (lookup, place), part in found)
