"""Fetches the rows of several tables together, from this rank or from those that own them.

A lookup has two halves. `Fetch.request` finds the distinct keys and, on several ranks, sends them to their
owners. `Fetch.rows` has the effects of a lookup (rows are evicted, admitted, inserted and counted) and brings
the rows. Between the two, `Fetch.peek` may read the rows where they are, without any effect. `Fetch.rows`
then reads again only those that have changed since, and its result is the same, bit for bit. So a scheduler
may request and peek for the next batch while this one computes.

For a table on a GPU with `gmeta.policies.Tiers`, rows in host memory move to the GPU only if they are
requested by `prefetch`, and are read over the bus until then. So a scheduler prefetches the rows of a batch
when it has requested the keys, and peeks one batch later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import tensorflow as tf

from gmeta.core import collectives
from gmeta.layers.exchange.pieces import SentKeys, exchange_values, send_keys
from gmeta.ops.device import DEVICE_NAMES, DeviceKind
from gmeta.ops.distinct import unique
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.read_ahead import Peeked


class Requested(NamedTuple):
    """The keys of a lookup.

    Attributes:
      keys: For each table (u,) int64, the distinct keys.
      inverse: For each table (n,) int32, the index of each requested key among the distinct ones.
      sent: The keys' exchange; None if this rank has all rows itself.
    """

    keys: tuple[tf.Tensor, ...]
    inverse: tuple[tf.Tensor, ...]
    sent: SentKeys | None

    @property
    def owned(self) -> tuple[tf.Tensor, ...]:
        """For each table (v,) int64, the distinct keys that this rank looks up."""
        return self.keys if self.sent is None else self.sent.owned.keys


class Owned(Protocol):
    """The interface of a `Requested`, and of a `gmeta.layers.exchange.window_keys.WindowKeys`."""

    @property
    def owned(self) -> tuple[tf.Tensor, ...]:
        """For each table (v,) int64, the distinct keys that this rank looks up."""

    @property
    def sent(self) -> SentKeys | None:
        """The keys' exchange; None if this rank has all rows itself."""


class Fetch:
    """The lookups of some tables.

    Args:
      tables: The tables.
      wire_dtype: As in `exchange_values`.
      name: Name of the collectives; the same on all ranks.
    """

    def __init__(self, tables: Sequence[HashTable], wire_dtype: tf.DType, name: str) -> None:
        self.tables = tuple(tables)
        self.wire_dtype = wire_dtype
        self.name = name

    @property
    def place(self) -> DeviceKind:
        """The place of all tables; host memory if they are in different places."""
        return "gpu" if {table.device for table in self.tables} == {"gpu"} else "cpu"

    @property
    def moves_to_gpu(self) -> bool:
        """Whether there are tables on a GPU whose rows come there only by prefetches."""
        return any(_moves_to_gpu(table) for table in self.tables)

    def request(self, keys: Sequence[tf.Tensor], samples: tf.Tensor | int = 0) -> Requested:
        """Find the distinct keys, and send them to their owners. The tables don't change.

        Args:
          keys: For each table (n,) int64.
          samples: The number of samples in this rank's batch, which all ranks learn.
        """
        if collectives.world().size == 1:
            found = [unique(each, device=t.device) for t, each in zip(self.tables, keys, strict=True)]
            return Requested(tuple(key for key, _ in found), tuple(inverse for _, inverse in found), None)
        sent = send_keys(keys, samples=samples, device=self.place, name=self.name)
        return Requested(sent.routed.keys, sent.routed.inverse, sent)

    def peek(self, requested: Owned) -> tuple[Peeked, ...]:
        """Read the requested rows that this rank owns, without any effect."""
        peeked = []
        for table, keys in zip(self.tables, requested.owned, strict=True):
            with tf.device(DEVICE_NAMES[table.device]):  # explicit, so that rows stay there between two steps
                peeked.append(table.peek(keys))
        return tuple(peeked)

    def look_up(
        self, requested: Owned, insert: bool | tf.Tensor, peeked: Sequence[Peeked] | None = None
    ) -> tuple[tf.Tensor, ...]:
        """Read the requested rows that this rank owns, with the effects of a lookup.

        Args:
          requested: The keys.
          insert: As in `gmeta.ops.HashTable.lookup`; the same on all ranks.
          peeked: What `peek` returned for these keys, if it was called.

        Returns:
          For each table the (v, dim) float32 rows of ``requested.owned``.
        """
        if peeked is None:
            looked_up = zip(self.tables, requested.owned, strict=True)
            return tuple(table.lookup_keys(keys, insert, distinct=True) for table, keys in looked_up)
        read = zip(self.tables, requested.owned, peeked, strict=True)
        return tuple(table.reread(keys, before, insert, distinct=True).rows for table, keys, before in read)

    def rows(
        self, requested: Requested, insert: bool | tf.Tensor, peeked: Sequence[Peeked] | None = None
    ) -> tuple[tf.Tensor, ...]:
        """Look up the requested rows where they are (see `look_up`), and bring them to the ranks that asked.

        Returns:
          For each table the (u, dim) float32 rows of ``requested.keys``.
        """
        rows = self.look_up(requested, insert, peeked)
        if requested.sent is None:
            return rows
        return exchange_values(
            requested.sent,
            rows,
            [table.dim for table in self.tables],
            wire_dtype=self.wire_dtype,
            device=self.place,
            name=self.name,
        )


def prefetch(lookups: Iterable[tuple[Fetch, Owned]], *, to_gpus_only: bool = False) -> None:
    """Bring the rows of a batch to the fast tier of their tables, if these have tiers; results don't change.

    A table gets one prefetch, of all its keys, since it keeps room for a number of prefetches, not of keys.

    Args:
      lookups: The batch's lookups, and their keys.
      to_gpus_only: Leave out tables in host memory, whose prefetches return when the rows have arrived.
    """
    keys: dict[int, tuple[HashTable, list[tf.Tensor]]] = {}
    for fetch, requested in lookups:
        for table, owned in zip(fetch.tables, requested.owned, strict=True):
            if _moves_to_gpu(table) if to_gpus_only else table.tiers is not None:
                keys.setdefault(id(table), (table, []))[1].append(owned)
    for table, parts in keys.values():
        with tf.device(DEVICE_NAMES[table.device]):
            table.prefetch(parts[0] if len(parts) == 1 else tf.concat(parts, axis=0))


def _moves_to_gpu(table: HashTable) -> bool:
    return table.tiers is not None and table.tiers.hbm_rows is not None
