"""Drawn tasks in the form that baselines see."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from gmeta.experiment.baselines.task_rows import Rows, Tasks


def tasks_of(seed: int, support: list[int], query: list[int], items: int) -> Tasks:
    """Draw tasks of these support and query sizes, with labels in half steps from 1 to 5."""
    rng = np.random.default_rng(seed)

    def rows(sizes: list[int]) -> Rows:
        splits = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        labels = rng.integers(2, 11, splits[-1]) / 2
        return Rows(rng.integers(0, items, splits[-1]), labels, splits)

    return Tasks(rows(support), rows(query))


@st.composite
def task_rows(draw: st.DrawFn) -> tuple[Tasks, int]:
    """Draw tasks and the number of items; a task may lack support rows."""
    items = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=2, max_size=6))
    support, query = ([size[side] for size in sizes] for side in (0, 1))
    return tasks_of(draw(st.integers(0, 2**16)), support, query, items), items
