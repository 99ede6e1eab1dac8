"""Tests of CUDA kernels by the library's C interface: they need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gpu.cuda_library import why_missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_missing()
    if reason is None:
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=reason))
