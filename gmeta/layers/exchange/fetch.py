"""Fetches the rows of several tables together, from this rank or from those that own them.

A lookup has two halves. `Fetch.request` finds the distinct keys and, on several ranks, sends them to their
owners. `Fetch.rows` has the effects of a lookup (rows are evicted, admitted, inserted and counted) and brings
the rows. Between the two, `Fetch.peek` may read the rows where they are, without any effect. `Fetch.rows`
then reads again only those that have changed since, and its result is the same, bit for bit. So a scheduler
may request and peek for the next batch while this one computes.

For a table on a GPU with `gmeta.policies.Tiers`, rows in host memory move to the GPU only if they are
requested by `prefetch`, and are read over the bus until then. So a scheduler prefetches the rows of a batch
when it has requested the keys, and peeks one batch later.

A scheduler has to know what a batch will look up. It runs the model's forward pass under `note_lookups`, in
a graph that is discarded: each lookup notes its keys and returns placeholders. Later it runs the step itself
under `use_fetched`: the step's lookups, in the same order, take what was fetched for them, and exchange no
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.step import step_context, within_step
from gmeta.layers.exchange.pieces import SentKeys, exchange_values, send_keys
from gmeta.layers.exchange.recorded_lookups import current_graph
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
      distinct: Whether a table's keys are distinct. If not, as in a benchmark, its update deduplicates them.
    """

    keys: tuple[tf.Tensor, ...]
    inverse: tuple[tf.Tensor, ...]
    sent: SentKeys | None
    distinct: bool = True

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


class Wanted(NamedTuple):
    """A lookup that a batch will make.

    Attributes:
      fetch: Who makes it.
      keys: For each table (n,) int64.
      stand_ins: The tensors that `note_lookups` gave for its distinct keys, their places and their rows.
    """

    fetch: Fetch
    keys: tuple[tf.Tensor, ...]
    stand_ins: tuple[tf.Tensor, ...] = ()


class Fetched(NamedTuple):
    """What is known of a lookup before its step.

    Attributes:
      fetch: Who makes it.
      requested: The keys.
      peeked: The rows that were read ahead; None if only the keys were requested.
    """

    fetch: Fetch
    requested: Any  # a Requested, or a WindowKeys
    peeked: tuple[Peeked, ...] | None = None


class LookupsAhead(Protocol):
    """The lookups of a step, whose keys were requested before it."""

    def bring(self, fetch: Fetch, insert: bool | tf.Tensor) -> tuple[Requested, tuple[tf.Tensor, ...]] | None:
        """Return the keys and rows of the step's next lookup; None if it wasn't foreseen.

        Raises:
          ConfigError: The lookup isn't the one that was foreseen.
        """

    def end_step(self) -> None:
        """Mark the step as done.

        Raises:
          ConfigError: The step has left out a lookup that was foreseen.
        """


@contextmanager
def note_lookups() -> Iterator[list[Wanted]]:
    """Note the lookups in a ``with`` block, which return stand-ins for the rows.

    Yields:
      The list of the lookups, which grows as they are made.
    """
    wanted: list[Wanted] = []
    with within_step(wanted=wanted):
        yield wanted


def note(fetch: Fetch, keys: Sequence[tf.Tensor]) -> tuple[Requested, tuple[tf.Tensor, ...]] | None:
    """Note a lookup and return stand-ins for its keys and rows, within `note_lookups`; else return None."""
    wanted = step_context().wanted
    if wanted is None:
        return None
    stand_in = tf.compat.v1.placeholder
    distinct = tuple(stand_in(tf.int64, [None]) for _ in keys)
    inverse = tuple(stand_in(tf.int32, [None]) for _ in keys)
    rows = tuple(stand_in(tf.float32, [None, table.dim]) for table in fetch.tables)
    wanted.append(Wanted(fetch, tuple(keys), (*distinct, *inverse, *rows)))
    return Requested(distinct, inverse, None), rows


class FetchedLookups:
    """The lookups of a step, whose keys were requested before it.

    Args:
      fetched: What is known of each lookup.
      then: A function that is called once the rows of the last one are requested.
    """

    def __init__(self, fetched: Sequence[Fetched], then: Callable[[], None]) -> None:
        self._rest = list(fetched)
        self._count = len(self._rest)
        self._then: Callable[[], None] | None = then
        self._graph = current_graph()

    def bring(self, fetch: Fetch, insert: bool | tf.Tensor) -> tuple[Requested, tuple[tf.Tensor, ...]] | None:
        """Return the keys and rows of the next lookup; None if it wasn't foreseen.

        Raises:
          ConfigError: The lookup isn't the one that was foreseen.
        """
        if not self._rest:
            return None
        check_next(fetch, self._rest[0].fetch, self._count - len(self._rest) + 1)
        _, requested, peeked = self._rest.pop(0)
        hear_samples(requested)
        rows = fetch.rows(requested, insert, peeked)
        if not self._rest and current_graph() is self._graph:
            self._call_then()
        return requested, rows

    def end_step(self) -> None:
        """Mark the step as done.

        Raises:
          ConfigError: The step has left out a lookup that was foreseen.
        """
        check_end(self._count, [each.fetch for each in self._rest])
        self._call_then()

    def _call_then(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


def check_next(made: Fetch, foreseen: Fetch, number: int) -> None:
    """Check that a step's next lookup is the one that was foreseen.

    Args:
      made: Who makes it.
      foreseen: Who was to make it.
      number: Its number in the step, from 1.

    Raises:
      ConfigError: Another one makes it.
    """
    if made is not foreseen:
        raise ConfigError(
            f"pipeline: lookup {number} of a step was foreseen in {foreseen.name!r} and is made in "
            f"{made.name!r}: let the model's lookup_inputs return its lookups in the order of the step"
        )


def check_end(count: int, left: Sequence[Fetch]) -> None:
    """Check that a step has made all lookups that were foreseen.

    Args:
      count: How many were foreseen.
      left: Those that it hasn't made.

    Raises:
      ConfigError: There are any.
    """
    if left:
        names = ", ".join(repr(fetch.name) for fetch in left)
        raise ConfigError(
            f"pipeline: a step was to make {count} lookups and made none of the last ones, in {names}: let "
            "the model's lookup_inputs return the lookups of its train step, no others"
        )


def hear_samples(requested: Owned) -> None:
    """Give the step, if there is one, the numbers of samples that came with the keys."""
    step = step_context().samples
    if step is not None and requested.sent is not None:
        step.hear(requested.sent.owned.notes)


@contextmanager
def use_fetched(lookups: LookupsAhead) -> Iterator[None]:
    """Let the lookups in the ``with`` block, which makes a whole step, take what was fetched for them.

    Raises:
      ConfigError: The step makes other lookups than were foreseen.
    """
    with within_step(fetched=lookups):
        yield
    lookups.end_step()
