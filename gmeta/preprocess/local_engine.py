"""Runs the plan in this process: map line by line, sort in memory, reduce task by task.

Meant for what fits in memory: a rating takes 36 bytes here. A million ratings take seconds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from gmeta.preprocess.bad_records import BadRecord, BadRecords, Reason
from gmeta.preprocess.config import PrepareConfig
from gmeta.preprocess.movielens import MovieLens
from gmeta.preprocess.plan import RATING, SORT_KEY, Batch, Rating, Ratings, map_rating, reduce_task

_REPORT_EVERY = 8192


class Progress(Protocol):
    """Is told how far a stage has come."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` rows of ``stage`` are through; the stage is over when they are equal."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class LocalResult:
    """The batches, not yet permuted, and an account of every rating that was read.

    Attributes:
      batches: In the order of (task, batch id).
      rows_read: Lines of the ratings file that aren't blank.
      left_out: Reason -> (ratings, tasks) that the selection leaves out.
      task_sizes: (T,) ratings of every task, selected or not, bad ones not counted.
    """

    batches: list[Batch]
    rows_read: int
    left_out: dict[str, tuple[int, int]]
    task_sizes: np.ndarray[tuple[int], np.dtype[np.int64]]


def run(
    source: MovieLens, config: PrepareConfig, bad: BadRecords, progress: Progress = no_progress
) -> LocalResult:
    """Map, sort and reduce all ratings of ``source``.

    Args:
      source: The opened folder.
      config: The plan's settings.
      bad: Applies the rule for bad records; its counts grow.
      progress: Is told of the stage ``"read"``, in lines.

    Raises:
      DataError: A bad record, under the rule ``"raise"``.
    """
    users, items, form = source.users.id_set(), source.items.id_set(), source.layout.ratings
    path = source.ratings.path
    counted = _Counted(source.ratings.lines(), source.ratings.line_count, progress)
    ratings = map_lines(counted, lambda line: map_rating(line, form, users, items), bad, path)
    return _reduce_all(shuffle([ratings]), source, config, bad, counted.count)


def map_lines(
    lines: Iterable[tuple[int, bytes]], map_line: Callable[[bytes], Rating], bad: BadRecords, path: Path
) -> Ratings:
    """One mapper's work: the ratings of some lines, in their order.

    Args:
      lines: Line numbers and lines.
      map_line: The map function.
      bad: Is given what the map function refuses.
      path: The file that the lines are from, for messages.

    Returns:
      (N,) of dtype `RATING`.
    """

    def mapped() -> Iterator[tuple[int, int, int, float, int]]:
        for number, line in lines:
            try:
                yield (*map_line(line), number)
            except BadRecord as error:
                bad.add(error, path, number)

    return np.fromiter(mapped(), RATING)


def shuffle(parts: Iterable[Ratings]) -> Ratings:
    """Bring the mappers' outputs together, sorted by `SORT_KEY`; their order is of no consequence."""
    ratings = np.concatenate([*parts])
    return ratings[np.lexsort([ratings[name] for name in reversed(SORT_KEY)])]


def by_task(ratings: Ratings) -> Iterator[Ratings]:
    """Cut sorted ratings where the task changes; views, not copies."""
    edges = np.flatnonzero(np.diff(ratings["task"])) + 1
    for start, end in itertools.pairwise([0, *edges.tolist(), len(ratings)]):
        if end > start:
            yield ratings[start:end]


def _reduce_all(
    ratings: Ratings, source: MovieLens, config: PrepareConfig, bad: BadRecords, rows_read: int
) -> LocalResult:
    batches: list[Batch] = []
    sizes: list[int] = []
    rows_out: Counter[str] = Counter()
    tasks_out: Counter[str] = Counter()
    for task_ratings in by_task(ratings):
        reduced = reduce_task(task_ratings, config)
        for task, _, item, _, line in reduced.repeated.tolist():
            message = f"user {task} has another rating of item {item}, which comes first"
            bad.add(BadRecord(Reason.REPEATED_RATING, message), source.ratings.path, line)
        batches.extend(reduced.batches)
        sizes.append(len(task_ratings) - len(reduced.repeated))
        if reduced.left_out:
            rows_out[reduced.left_out] += sizes[-1]
            tasks_out[reduced.left_out] += 1
    _refuse_empty_tasks(ratings, source, bad)
    left_out = {reason: (rows_out[reason], tasks_out[reason]) for reason in sorted(rows_out)}
    return LocalResult(batches, rows_read, left_out, np.array(sizes, np.int64))


def _refuse_empty_tasks(ratings: Ratings, source: MovieLens, bad: BadRecords) -> None:
    present = np.isin(source.users.ids, ratings["task"])
    for user, line in zip(
        source.users.ids[~present].tolist(), source.users.lines[~present].tolist(), strict=True
    ):
        message = f"user {user} has no rating in {source.ratings.path.name}"
        bad.add(BadRecord(Reason.EMPTY_TASK, message), source.users_path, line)


class _Counted:
    """Passes lines on, counts them, and reports from time to time."""

    def __init__(self, lines: Iterator[tuple[int, bytes]], total: int, progress: Progress) -> None:
        self._lines, self._total, self._progress = lines, total, progress
        self.count = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for number, line in self._lines:
            self.count += 1
            if self.count % _REPORT_EVERY == 0:
                self._progress("read", number, self._total)
            yield number, line
        self._progress("read", self._total, self._total)
