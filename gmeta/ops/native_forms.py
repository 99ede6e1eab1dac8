"""Chooses the form of attention that a process computes: its device's native one, or plain TensorFlow."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import build_info, library_path

# The switch between native ops and their forms in plain TensorFlow
# (`gmeta.ops.table.portable_tables.portable_ops`).


class FreezesTables(Protocol):
    """Source of copies to read instead of tables: `gmeta.ops.table.portable_tables.PortableTables`."""

    def freeze(self, table: Any) -> Any:
        """Copy a table in its current state."""
        ...


ACTIVE: ContextVar[FreezesTables | None] = ContextVar("portable_tables", default=None)
"""The tables that `portable_ops` has set in this thread; None outside of it."""


class _NoTables:
    """For computations without tables."""

    def freeze(self, table: Any) -> Any:
        raise AssertionError(f"table {table.name!r} is read where no tables are expected")


@contextmanager
def portable_forms(tables: FreezesTables | None = None) -> Iterator[None]:
    """Make ops compute in plain TensorFlow, in this thread and inside this block.

    Args:
      tables: Source of the copies that lookups read; without it, nothing may be looked up.
    """
    token = ACTIVE.set(_NoTables() if tables is None else tables)
    try:
        yield
    finally:
        ACTIVE.reset(token)


def is_portable() -> bool:
    """Return whether ops must use their forms in plain TensorFlow."""
    return ACTIVE.get() is not None


def freeze(table: Any, insert: bool | tf.Tensor) -> Any:
    """Return the copy to read instead of the table; None outside of `portable_ops`.

    Raises:
      ConfigError: The lookup would insert.
    """
    tables = ACTIVE.get()
    if tables is None:
        return None
    if insert is True:
        raise ConfigError(
            f"table {table.name!r}: an exported graph stores no rows; look up with insert=False, as "
            "layers do that are called with training=False"
        )
    return tables.freeze(table)


WIDTHS = (64, 128, 256)
"""The widths of heads that the GPU kernels take."""
DTYPES = (tf.bfloat16, tf.float16)
"""The dtypes in which the GPU kernels compute; sums are in float32."""


def on_gpu() -> bool:
    """Return whether this process computes on a GPU."""
    return bool(tf.config.get_visible_devices("GPU"))


@functools.cache
def built_with_cuda() -> bool:
    """Return whether the native library has kernels for GPUs."""
    return build_info(library_path("ops"))["cuda"] == "1"


def has_row_kernels(x: tf.Tensor) -> bool:
    """Return whether this process can use the row kernels, which run on any GPU, for a matrix.

    Args:
      x: The matrix. Its width must be a multiple of 8: kernels read and write 16 bytes at a time.
    """
    if x.dtype not in DTYPES or is_portable() or not (on_gpu() and built_with_cuda()):
        return False
    return x.shape.rank == 2 and bool(x.shape[1]) and x.shape[1] % 8 == 0


def is_native(width: int | None, values: int | None, dtype: tf.DType) -> bool:
    """Return whether this process has a native kernel for attention of these shapes.

    If it computes on a GPU that has no kernel for the case, it warns once for each reason: plain TensorFlow
    then builds every (length, length) matrix, on the GPU as long as they fit there.

    Args:
      width: Numbers of a query and of a key; None: attention without queries and keys.
      values: Numbers of a value.
      dtype: The dtype of queries, keys and values.
    """
    if dtype == tf.float64:
        return False
    if not on_gpu():
        return True
    reason = _why_unsupported(width, values, dtype)
    if reason:
        _warn(reason)
    return not reason


def _why_unsupported(width: int | None, values: int | None, dtype: tf.DType) -> str:
    if dtype not in DTYPES:
        return f"they take bfloat16 and float16, not {dtype.name} (tf.keras.mixed_precision sets it)"
    if width not in (None, values) or values not in WIDTHS:
        widths = f"{values}" if width is None else f"{width} and {values}"
        return f"they take heads of one width for q, k and v, {WIDTHS}, not {widths}"
    return _why_no_kernels()


@functools.cache
def _why_no_kernels() -> str:
    """Explain why this build or this GPU has no kernels; "" if it has them."""
    if not built_with_cuda():
        return "this build has none: put nvcc on PATH and build again with GMETA_CUDA=ON"
    for gpu in tf.config.get_visible_devices("GPU"):
        capability = tf.config.experimental.get_device_details(gpu).get("compute_capability")
        if capability != (9, 0):
            return f"they need compute capability 9.0 (H100, H200), and {gpu.name} has {capability}"
    return ""


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f"HSTU attention: its GPU kernels can't be used: {reason}. Plain TensorFlow computes it, slower and "
        "with memory for every pair of tokens, and the CPU where those are too many",
        stacklevel=5,
    )
