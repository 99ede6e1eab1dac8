"""The forms that the benchmark compares, each at its best settings for some purpose."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from parts.history_formats.duckdb_form import DuckDB
from parts.history_formats.events import COLUMNS, Events
from parts.history_formats.gmeta_form import GMeta
from parts.history_formats.newest import Histories
from parts.history_formats.pyarrow_form import PyArrow

_DELTA = {name: "DELTA_BINARY_PACKED" for name in ("user", *COLUMNS) if name != "price"}
_DENSE = {"compression": "zstd", "use_dictionary": False, "column_encoding": _DELTA}
_LIGHT = {"compression": "none", "use_dictionary": False, "column_encoding": _DELTA}
_PLAIN = {"compression": "none", "use_dictionary": False}
_LARGE, _SMALL = {"rows": 1 << 16, "data_page_size": 1 << 14}, {"rows": 1 << 11}


class Form(Protocol):
    """A store of events.

    Attributes:
      size: Its bytes.
    """

    size: int

    def scan(self, requests: NDArray[np.void], longest: int) -> Histories:
        """Answer requests; see `GMeta.scan`."""
        ...


def contenders(folder: Path, events: Events) -> dict[str, Form]:
    """Store the events in each form.

    Args:
      folder: An empty one, for their files.
      events: The events to store.

    Returns:
      Name -> form; without RocksDB if rocksdict isn't installed.
    """
    kinds: dict[str, tuple[Callable[..., Form], dict[str, Any]]] = {
        "gmeta": (GMeta, {}),
        "parquet_dense": (PyArrow, {**_LARGE, **_DENSE}),
        "parquet_dense_small": (PyArrow, {**_SMALL, **_DENSE}),
        "parquet_light_small": (PyArrow, {**_SMALL, **_LIGHT}),
        "parquet_plain": (PyArrow, {**_LARGE, **_PLAIN}),
        "parquet_plain_small": (PyArrow, {**_SMALL, **_PLAIN}),
        "parquet_duckdb": (DuckDB, {**_LARGE, **_DENSE}),
    }
    if importlib.util.find_spec("rocksdict"):
        from parts.history_formats.rocksdb_form import RocksDB

        for codec in ("zstd", "lz4", "none"):
            kinds[f"rocksdb_{codec}"] = RocksDB, {"compression": codec, "by_index": True}
        kinds["rocksdb_lz4_iterated"] = RocksDB, {"compression": "lz4", "by_index": False}
    forms = {}
    for name, (kind, options) in kinds.items():
        (folder / name).mkdir()
        forms[name] = kind(folder / name, events, **options)
    return forms


def assert_same(forms: dict[str, Form], requests: NDArray[np.void], longest: int) -> None:
    """Fail unless all forms answer requests with the same events.

    Args:
      forms: Name -> form.
      requests: (R,) `REQUEST`.
      longest: The most events of a request.

    Raises:
      AssertionError: They don't.
    """
    answers = {name: form.scan(requests, longest) for name, form in forms.items()}
    row_splits, columns = answers["gmeta"]
    for name, found in answers.items():
        np.testing.assert_array_equal(found.row_splits, row_splits, name)
        for own, other in zip(columns, found.columns, strict=True):
            np.testing.assert_array_equal(other, own, name)


def versions() -> dict[str, str]:
    """Return the versions of the peers."""
    is_there = importlib.util.find_spec("rocksdict")
    rocksdict = importlib.metadata.version("rocksdict") if is_there else "absent"
    return {"pyarrow": pa.__version__, "duckdb": duckdb.__version__, "rocksdict": rocksdict}
