"""Divides a test's parameters between `make test` and `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any] | Callable[..., bool], cells: Iterable[Any]) -> list[Any]:
    """Mark cells of a parametrised test slow, except some.

    Args:
      quick: The cells that run in `make test`, or a function that is true of them.
      cells: All of them; a tuple holds the values of several parameters.

    Returns:
      The cells, for `pytest.mark.parametrize`, in their order.

    Raises:
      ValueError: None of them is quick.

    Example:
      >>> [len(cell.marks) for cell in slow_but([1], [1, 2])]
      [0, 1]
    """
    found = []
    for cell in cells:
        values = cell if isinstance(cell, tuple) else (cell,)
        stays = quick(*values) if callable(quick) else cell in quick
        found.append(pytest.param(*values, marks=() if stays else pytest.mark.slow))
    if not any(not each.marks for each in found):
        raise ValueError("slow_but: no cell would run in `make test`")
    return found
