"""The preparation as pure functions: map, sort key, reduce, split, and the order of the output.

The computation is G-Meta's preprocessing (section 2.2): a rating is mapped to its task, a task's ratings are
brought together in time order, cut into batches that are numbered, and whole batches, never single records,
are permuted, so that a reader finds a batch's records side by side and still meets tasks in random order.

::

    line ──map_rating──> (task, timestamp, item, rating) ──sort──> a task's ratings ──reduce_task──> batches
                                                                                                        │
         shards <── shard_of(order_key) and sort by order_key <── split_of(task) <──────────────────────┘

An engine supplies what stands between the functions: reading, the shuffle, parallel workers, writing. Three
properties let any engine, with any number of workers, produce the same bytes:

* the sort key is total over everything that is written, so the order of the input lines doesn't matter;
* the place of a batch (split, shard, position in it) is a function of (seed, task, batch id) alone;
* `order_key` is arithmetic on 64-bit integers written out here, not a library's hash.

Attributes of users and items aren't carried through the shuffle: a rating is four numbers there, and the
attributes are joined from the two small tables when records are written.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.core.schema import Column, Schema
from gmeta.preprocess.bad_records import BadRecord, Reason
from gmeta.preprocess.config import PrepareConfig
from gmeta.preprocess.movielens import FileForm
from gmeta.preprocess.movielens_records import parse_integer, parse_rating, show, split_fields

PLAN_VERSION = 1
"""Raised whenever the same input and settings would give other bytes."""

SCHEMA = Schema(
    (
        Column("task"),
        Column("batch_id"),
        Column("item"),
        Column("year"),
        Column("genre", is_list=True),
        Column("gender"),
        Column("age"),
        Column("occupation"),
        Column("area"),
        Column("rating", "float32"),
        Column("timestamp"),
    )
)
"""A record of the prepared data set; what the numbers mean is in `gmeta.preprocess.movielens_records`."""

RATING = np.dtype(
    [("task", "<i8"), ("timestamp", "<i8"), ("item", "<i8"), ("rating", "<f4"), ("line", "<i8")]
)
"""A mapped rating. ``line`` is where it was read, for messages only; it breaks no tie that is written."""
Ratings = NDArray[np.void]
SORT_KEY = ("task", "timestamp", "item", "rating", "line")


class Rating(NamedTuple):
    """What `map_rating` makes of a line. The tuple's own order is the sort key."""

    task: int
    timestamp: int
    item: int
    rating: float


class Batch(NamedTuple):
    """Ratings of one task that stay together: (N,) of dtype `RATING`, in time order."""

    task: int
    batch_id: int
    ratings: Ratings


class Reduced(NamedTuple):
    """What `reduce_task` makes of a task.

    Attributes:
      batches: The task's batches; empty if the selection leaves it out.
      left_out: Why the selection leaves it out, or None.
      repeated: Ratings of an item that the task has rated before, which are in no batch.
    """

    batches: tuple[Batch, ...]
    left_out: str | None
    repeated: Ratings


def map_rating(line: bytes, form: FileForm, users: Container[int], items: Container[int]) -> Rating:
    """Read one line of the ratings file.

    Args:
      line: ``user, item, rating, timestamp``, without the line's end.
      form: The file's form.
      users: The known users' ids.
      items: The known items' ids.

    Raises:
      BadRecord: A field too few or too many, one that isn't a number, a rating that is out of range, or a
        user or an item that has no attributes.
    """
    user_text, item_text, rating_text, time_text = split_fields(line, form.separator, form.fields)
    user = parse_integer(user_text, "user id")
    item = parse_integer(item_text, "item id")
    if user not in users:
        raise BadRecord(Reason.UNKNOWN_USER, f"user {show(user_text)} isn't in the users file")
    if item not in items:
        raise BadRecord(Reason.UNKNOWN_ITEM, f"item {show(item_text)} isn't in the items file")
    return Rating(user, parse_integer(time_text, "timestamp"), item, parse_rating(rating_text))


def reduce_task(ratings: Ratings, config: PrepareConfig) -> Reduced:
    """Select and cut one task.

    An item that the task has rated before is refused: with one of the two in the support set and the other
    in the query set, the answer would be given away. The earliest by sort key stays. MovieLens as published
    has no such pair.

    Args:
      ratings: (N,) of dtype `RATING`, N > 0, of one task, sorted by `SORT_KEY`.
      config: The bounds on a task's size, and ``batch_rows``.
    """
    _, first = np.unique(ratings["item"], return_index=True)
    again = np.ones(len(ratings), np.bool_)
    again[first] = False
    repeated, ratings = ratings[again], ratings[~again]
    left_out = selection(len(ratings), config)
    if left_out:
        return Reduced((), left_out, repeated)
    pieces = 1 if config.batch_rows is None else max(1, len(ratings) // config.batch_rows)
    task = int(ratings["task"][0])
    batches = tuple(Batch(task, number, part) for number, part in enumerate(np.array_split(ratings, pieces)))
    return Reduced(batches, None, repeated)


def selection(size: int, config: PrepareConfig) -> str | None:
    """Why a task of ``size`` ratings is left out, or None if it is kept."""
    if size < config.min_ratings:
        return f"task has fewer than {config.min_ratings} ratings"
    if size > config.max_ratings:
        return f"task has more than {config.max_ratings} ratings"
    return None


def split_of(task: int, config: PrepareConfig) -> str:
    """The split that a task belongs to, ``"warm"`` or ``"cold"``."""
    return "cold" if task % config.cold_modulus == 0 else "warm"


def order_key(seed: int, task: NDArray[np.int64], batch_id: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A pseudo-random number for each batch; sorting by it permutes the batches.

    Three rounds of SplitMix64 (Steele, Lea and Flood, 2014), each absorbing one of the arguments.

    Args:
      seed: Another seed gives another permutation.
      task: (N,) the batches' tasks.
      batch_id: (N,) the batches' numbers in their tasks.

    Returns:
      (N,) uint64, uniform.
    """
    state = np.zeros(len(task), np.uint64)
    for value in (np.full(len(task), seed, np.int64), task, batch_id):
        state = _splitmix64(state ^ value.astype(np.uint64))
    return state


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)  # on arrays, arithmetic wraps at 2^64
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shard_of(key: NDArray[np.uint64], shards: int) -> NDArray[np.int64]:
    """The shard that each batch is written to: equal ranges of `order_key`, in ascending order.

    Shards therefore hold about, not exactly, as many batches each; in exchange a worker that writes one
    needs to know nothing about the others.
    """
    return (((key >> np.uint64(32)) * np.uint64(shards)) >> np.uint64(32)).astype(np.int64)
