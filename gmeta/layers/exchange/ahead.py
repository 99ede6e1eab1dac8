"""Lets a scheduler request the keys of a step's lookups before the step, and read their rows ahead.

A scheduler has to know what a batch will look up. It runs the model's forward pass under `note_lookups`, in
a graph that is discarded: each lookup notes its keys and returns placeholders. Later it runs the step itself
under `use_fetched`: the step's lookups, in the same order, take what was fetched for them, and exchange no
keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.step import step_context, within_step
from gmeta.layers.exchange.fetch import Fetch, Owned, Requested
from gmeta.layers.exchange.recorded_lookups import current_graph
from gmeta.ops.table.read_ahead import Peeked


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
