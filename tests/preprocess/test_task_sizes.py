"""The picture of the tasks' sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.preprocess import PrepareConfig, prepare
from gmeta.preprocess.summary import bin_edges, draw_task_sizes
from gmeta.testing import small_100k


@given(sizes=st.lists(st.integers(1, 5000), min_size=1), low=st.integers(1, 50), width=st.integers(0, 200))
def test_bins_hold_every_size_and_part_at_the_bounds(sizes, low, width):
    edges = bin_edges(min(sizes), max(sizes), low, low + width)
    assert np.histogram(sizes, edges)[0].sum() == len(sizes)
    assert {low - 0.5, low + width + 0.5} <= set(edges)
    assert (np.diff(edges) >= 1).all()


@pytest.mark.parametrize(
    "config", [PrepareConfig(), PrepareConfig(min_rows=1, max_rows=0), PrepareConfig(max_rows=0)]
)
def test_it_is_a_png_and_the_same_every_time(tmp_path, config):
    summary = prepare(small_100k(tmp_path / "raw"), tmp_path / "out", config)
    first = draw_task_sizes(summary, tmp_path / "a.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert first == draw_task_sizes(summary, tmp_path / "b.png").read_bytes()
