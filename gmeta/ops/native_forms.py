"""Which form of attention a process computes: the native one of its device, or plain TensorFlow."""

from __future__ import annotations

import functools
import warnings

import tensorflow as tf

from gmeta.core.native import build_info, library_path
from gmeta.ops.portable import is_portable

WIDTHS = (64, 128, 256)
"""The widths of heads that the GPU kernels take."""
DTYPES = (tf.bfloat16, tf.float16)
"""What the kernels of a GPU compute in; sums are in float32."""


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return bool(tf.config.get_visible_devices("GPU"))


@functools.cache
def built_with_cuda() -> bool:
    """Whether the native library has kernels for GPUs."""
    return build_info(library_path("ops"))["cuda"] == "1"


def has_row_kernels(x: tf.Tensor) -> bool:
    """Whether the kernels for rows, which any GPU has, take a matrix where this process computes.

    Args:
      x: Rows of a multiple of 8 numbers: kernels read and write 16 bytes at a time.
    """
    if x.dtype not in DTYPES or is_portable() or not (on_gpu() and built_with_cuda()):
        return False
    return x.shape.rank == 2 and bool(x.shape[1]) and x.shape[1] % 8 == 0


def is_native(width: int | None, values: int | None, dtype: tf.DType) -> bool:
    """Whether attention of these shapes has a native kernel where this process computes.

    Where it computes on a GPU that has none for the case, it warns, once for each reason: plain TensorFlow
    then builds every (length, length) matrix, on the GPU while that has room for them.

    Args:
      width: Numbers of a query and of a key; None: there are none.
      values: Numbers of a value.
      dtype: Of all three.
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
    if width is None:
        return "they take no attention by the bias alone"
    if width != values or width not in WIDTHS:
        return f"they take heads of one width for q, k and v, {WIDTHS}, not {width} and {values}"
    return _why_no_kernels()


@functools.cache
def _why_no_kernels() -> str:
    """Why this build or this GPU has no kernels; "" where it has."""
    if not built_with_cuda():
        return "this build has none: put nvcc on PATH and build again"
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
