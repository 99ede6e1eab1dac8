"""Tests of CUDA kernels by the library's C interface: they need a GPU, and no TensorFlow."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.gpu.cuda_library import why_missing

ROOT = Path(__file__).resolve().parents[2]

if importlib.util.find_spec("tensorflow") is None:
    # The NumPy reference needs no TensorFlow, but the doors of its packages do: they are passed by.
    for name in ("gmeta.ops", "support.reference.table"):
        package = ModuleType(name)
        package.__path__ = [str(ROOT / name.replace(".", "/"))]
        sys.modules[name] = package


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_missing()
    if reason is None:
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.skip(reason=reason))
