"""The two data sets of the meta-learning benchmark.

MeLU's rows resemble MovieLens-1M's. A user has one gender, age, occupation and area, and rates films that are
drawn by popularity and have fixed attributes. Support sizes follow MeLU's warm users with 13 to 100 ratings,
of which ten are the query.

Ali-CCP's fields are the 18 with one value, in the published vocabularies, and five with several; labels are
click, and click with conversion; a task is a scenario's part of a step. Ids are log-uniform, which is Zipf(1)
over the vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import gmeta.io

import numpy as np
from parts.meta.batches import Batch, Column, Field, Lists, numbered, split, take_rows, task_batch

QUERY = 10
SUPPORT_QUANTILES = ([0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1], [3, 5, 8, 15, 31, 53, 75, 82, 90])
"""Quantiles of the support sizes of MeLU's 2,653 warm users."""
MELU_ITEM = {"rate": (6, 1), "genre": (25, 2.4), "director": (2186, 1.08), "actor": (8030, 4)}
"""An item's fields: the number of ids, and the ids of an item."""
MELU_USER = {"gender": 2, "age": 7, "occupation": 21, "area": 3402}
FILMS = 3706
ALI_ONE = (238635, 98, 14, 3, 8, 4, 4, 3, 5, 467298, 6929, 263942, 106399, 5888, 104830, 51878, 37148, 4)
ALI_SEVERAL = {
    "109_14": (5000, 4),
    "110_14": (200_000, 8),
    "127_14": (100_000, 8),
    "150_14": (50_000, 8),
    "210": (90_000, 4),
}


def melu(tasks: int, count: int) -> tuple[list[Batch], list[Field]]:
    """Draw batches of users with their ratings, and return them with the fields."""
    rng = np.random.default_rng(0)
    films = {
        name: _lists(rng, size, FILMS, mean) if mean > 1 else rng.integers(0, size, FILMS)
        for name, (size, mean) in MELU_ITEM.items()
    }
    popularity = 1.0 / (np.arange(FILMS) + 50.0)
    popularity /= popularity.sum()
    batches = []
    for _ in range(count):
        sizes = np.interp(rng.random(tasks), *SUPPORT_QUANTILES).astype(np.int64) + QUERY
        rated = np.concatenate([rng.choice(FILMS, size, replace=False, p=popularity) for size in sizes])
        columns = {name: take_rows(column, rated) for name, column in films.items()}
        for name, size in MELU_USER.items():
            columns[name] = np.repeat(rng.integers(0, size, tasks), sizes)
        labels = rng.integers(1, 6, (len(rated), 1)).astype(np.float32)
        batches.append(Batch(columns, labels, *split(sizes - QUERY, np.full(tasks, QUERY))))
    fields = [Field(name, size, mean > 1) for name, (size, mean) in MELU_ITEM.items()]
    return batches, fields + [Field(name, size) for name, size in MELU_USER.items()]


def prepared(path: Path, tasks: int, count: int) -> tuple[list[Batch], list[Field]]:
    """Read batches of a folder that `gmeta prepare` wrote, with its split: ``data/warm``."""
    elements = gmeta.io.tasks(path, tasks_per_batch=tasks, query=QUERY).take(count)
    return numbered([task_batch(element) for element in elements])


def ali_ccp(tasks: int, samples: int, count: int, shrink: int = 1) -> tuple[list[Batch], list[Field]]:
    """Draw batches of scenarios.

    Args:
      tasks: The tasks in a batch.
      samples: The most samples of a support set, which has at least a quarter as many; a query set has half.
      count: The number of batches.
      shrink: A divisor of the vocabularies.
    """
    fields = [Field(f"field{n}", max(2, size // shrink)) for n, size in enumerate(ALI_ONE)]
    fields += [Field(name, max(2, size // shrink), True) for name, (size, _) in ALI_SEVERAL.items()]
    rng, batches = np.random.default_rng(0), []
    for _ in range(count):
        supports = rng.integers(samples // 4, samples + 1, tasks)
        queries = np.full(tasks, samples // 2)
        rows = int((supports + queries).sum())
        columns: dict[str, Column] = {}
        for field in fields:
            if field.several:
                columns[field.name] = _lists(rng, field.vocabulary, rows, ALI_SEVERAL[field.name][1], True)
            else:
                columns[field.name] = _log_uniform(rng, field.vocabulary, rows)
        click = rng.random(rows) < 0.2
        labels = np.stack([click, click & (rng.random(rows) < 0.2)], axis=1).astype(np.float32)
        batches.append(Batch(columns, labels, *split(supports, queries)))
    return batches, fields


def _lists(rng: np.random.Generator, size: int, rows: int, mean: float, skewed: bool = False) -> Lists:
    lengths = 1 + rng.poisson(mean - 1, rows)
    total = int(lengths.sum())
    return Lists(_log_uniform(rng, size, total) if skewed else rng.integers(0, size, total), lengths)


def _log_uniform(rng: np.random.Generator, size: int, count: int) -> np.ndarray:
    return np.minimum(np.exp(rng.random(count) * np.log(size)), size).astype(np.int64) - 1
