"""Where ops compute: the device of a table, and the form of an op, native or plain TensorFlow."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol, get_args

import tensorflow as tf
from tensorflow.python.framework import kernels as registered

from gmeta.core.errors import ConfigError
from gmeta.core.native import build_info, library_path, load_op_library

Device = Literal["auto", "cpu", "gpu"]
"""A requested device. ``"auto"`` is the value of the environment variable `VARIABLE`, or else ``"cpu"``."""
VARIABLE = "GMETA_TABLE_DEVICE"
DeviceKind = Literal["cpu", "gpu"]
"""The device that a table actually uses."""

DEVICE_NAMES: dict[DeviceKind, str] = {"cpu": "CPU:0", "gpu": "GPU:0"}
"""Device -> its name for `tf.device`. A process uses the first of the GPUs that it sees."""


def asked_place(device: str, owner: str) -> DeviceKind:
    """Return the requested device of a table, even if the machine doesn't have it.

    Args:
      device: The requested device.
      owner: Name of the table, for messages.

    Raises:
      ConfigError: ``device`` isn't one of `Device`.
    """
    if device == "auto":
        device = os.environ.get(VARIABLE, "cpu")
        owner = f"{VARIABLE}, {owner}"
    if device not in get_args(Device):
        raise ConfigError(f"{owner}: device must be one of {', '.join(get_args(Device))}, got {device!r}")
    return "gpu" if device == "gpu" else "cpu"


def place_of(device: str, owner: str) -> DeviceKind:
    """Choose the device on which to create a table.

    If a GPU is requested but there is none, or gmeta was built without CUDA, the table is kept in host
    memory, with one warning for each reason. Its contents and results are the same there.

    Args:
      device: The requested device.
      owner: Name of the table, for messages.

    Raises:
      ConfigError: ``device`` isn't one of `Device`.
    """
    if asked_place(device, owner) == "cpu":
        return "cpu"
    reason = why_no_gpu()
    if reason:
        warn_once(reason)
    return "cpu" if reason else "gpu"


def compute_place() -> DeviceKind:
    """Return where a process computes with the rows of a lookup: on the GPU if visible."""
    return "gpu" if tf.config.get_visible_devices("GPU") else "cpu"


@functools.cache
def why_no_gpu() -> str:
    """Explain why tables can't be on a GPU in this process; "" if they can."""
    if not tf.config.list_logical_devices("GPU"):
        return "TensorFlow sees no GPU"
    if build_info(library_path("ops"))["cuda"] != "1":
        return "gmeta was built without CUDA: put nvcc on PATH and build again with GMETA_CUDA=ON"
    return ""


@functools.cache
def warn_once(reason: str) -> None:
    """Warn that a table stays in host memory, once for each reason."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"device='gpu': {reason}. Tables are kept in host memory instead", stacklevel=level)


def _is_inside(module: str) -> bool:
    """Return whether a module isn't the user's own, so that the warning points at the user's line."""
    return module.split(".")[0] in ("gmeta", "tensorflow", "tf_keras")


# Converts users' inputs of ops to tensors, or raises clear errors.


def ids_tensor(ids: Any, owner: str, argument: str = "ids") -> tf.Tensor:
    """Convert ``ids`` to an int64 tensor of the same shape; uint64 are taken as the int64 of the same bits.

    Raises:
      ConfigError: The ids are not integers.
    """
    tensor = integers_of(ids)  # without a dtype hint, which would convert booleans to integers
    no_ids = not tf.is_tensor(ids) and tensor.shape.num_elements() == 0  # [] is float32 to TensorFlow
    if not tensor.dtype.is_integer and not no_ids:
        raise ConfigError(f"{owner}: {argument} must be integers (int64), got dtype {tensor.dtype.name}")
    return tf.cast(tensor, tf.int64)


def integers_of(ids: Any) -> tf.Tensor:
    """Convert ``ids`` to a tensor like TensorFlow, but uint64 to int64 of the same bits.

    Hashes of other systems are uint64. Values below 2^63 don't change, so a column of ids may have either
    dtype.

    Raises:
      ConfigError: The ids include Python integers of at least 2^63, which TensorFlow doesn't convert.
    """
    try:
        ids = tf.convert_to_tensor(ids)
    except ValueError as error:
        if "out-of-range integer" not in str(error):
            raise
        raise ConfigError(
            "ids are Python integers that don't fit int64: pass them as numpy.array(ids, numpy.uint64), "
            "which is taken as the int64 of the same bits"
        ) from error
    return tf.bitcast(ids, tf.int64) if ids.dtype == tf.uint64 else ids


def keys_vector(keys: Any, owner: str) -> tf.Tensor:
    """Convert ``keys`` to an int64 vector.

    Raises:
      ConfigError: The keys are not integers, or not of rank 1.
    """
    tensor = ids_tensor(keys, owner, "keys")
    if tensor.shape.rank not in (None, 1):
        raise ConfigError(f"{owner}: keys must be a vector, got shape {tensor.shape}")
    return tensor


def float_matrix(values: Any, owner: str, argument: str, rows: tf.Tensor, width: int) -> tf.Tensor:
    """Convert ``values`` to a float32 matrix of ``rows`` rows and ``width`` columns.

    Raises:
      ConfigError: The values have another dtype or an incompatible shape.
    """
    tensor = tf.convert_to_tensor(values, dtype_hint=tf.float32)
    if tensor.dtype != tf.float32:
        raise ConfigError(f"{owner}: {argument} must be float32, got dtype {tensor.dtype.name}")
    expected = tf.TensorShape([rows.shape[0], width])
    if not tensor.shape.is_compatible_with(expected):
        raise ConfigError(f"{owner}: {argument} must have shape {expected}, got {tensor.shape}")
    return tensor


# Where tensors are, as far as a graph shows it, and how vectors of them stay there.


def shared_place(tensors: Sequence[tf.Tensor]) -> DeviceKind:
    """Return where tensors are: ``"gpu"`` if all are known to be there.

    A graph doesn't show where arguments of a ``tf.function`` will be. To show it, a function takes them
    through ``tf.identity`` under ``tf.device("GPU:0")``.
    """
    return "gpu" if tensors and all("GPU" in (each.device or "") for each in tensors) else "cpu"


def split_numbers(values: tf.Tensor, sizes: Any, count: int, *, device: DeviceKind) -> list[tf.Tensor]:
    """Split a vector of int64 into ``count`` parts, like ``tf.split``, on ``device``.

    TensorFlow splits integers only on a CPU, so a vector on a GPU would travel to host memory and back. On a
    GPU, it is split as float64 of the same bits.
    """
    if device == "cpu":
        return list(tf.split(values, sizes, num=count))
    parts = tf.split(tf.bitcast(values, tf.float64), sizes, num=count)
    return [tf.bitcast(part, tf.int64) for part in parts]


# Passes tensors out of a function and into its next call where they are: in host memory, or on the GPU.
#
# TensorFlow passes each result of a ``tf.function`` through an op, which it places on the GPU if there is
# one. A result in host memory is therefore copied to the GPU, and back when the next call needs it in host
# memory. But TensorFlow keeps int32 results in host memory, even if an op wrote them to the GPU's memory. So
# a tensor in host memory is bitcast to int32 when it leaves and enters, and a boolean becomes 0 or 1; an
# int32 tensor in the GPU's memory is bitcast to uint32.
#
# Each result fixes its device, because TensorFlow recreates a function's ops for arguments on other devices.
# Random number generators would then restart: a step would repeat the dropout of the previous one.

_CROSS_AS_INT32 = (tf.int64, tf.float32, tf.float64)


def to_caller(tensor: tf.Tensor, place: DeviceKind = "cpu") -> tf.Tensor:
    """Return a form of a tensor that a function can return without moving it to another device.

    Args:
      tensor: Any tensor.
      place: Where the op that computed it runs.

    Example:
      >>> ids = tf.constant([3, 1 << 40], tf.int64)
      >>> from_caller(to_caller(ids), tf.int64).numpy()
      array([            3, 1099511627776])
    """
    if not on_gpu():
        return tensor
    if place == "gpu":
        with tf.device("GPU:0"):
            crosses = tensor.dtype == tf.int32 and _is_in_gpu_memory(tensor)
            return tf.bitcast(tensor, tf.uint32) if crosses else tf.identity(tensor)
    with tf.device("CPU:0"):
        if tensor.dtype == tf.bool:
            return tf.cast(tensor, tf.int32)
        return tf.bitcast(tensor, tf.int32) if tensor.dtype in _CROSS_AS_INT32 else tf.identity(tensor)


def from_caller(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the original tensor, of the given dtype, that was passed to `to_caller`."""
    if tensor.dtype == dtype:
        return tensor
    with tf.device("GPU:0" if dtype == tf.int32 else "CPU:0"):
        return tf.cast(tensor, dtype) if dtype == tf.bool else tf.bitcast(tensor, dtype)


def read_copy(tensor: tf.Tensor, copy: tf.Tensor) -> bool:
    """Make the ops that read a tensor in the GPU's memory read a copy of it, which is there.

    They may also read it through a ``tf.identity`` on the host, as checked tensors are; they then still wait
    for the check. Ops that read the tensor in host memory, or only its shape, read the original tensor as
    before, and so do calls of functions.

    Args:
      tensor: A tensor of the graph that is being traced. Its readers were traced before this call.
      copy: The same numbers, in the GPU's memory.

    Returns:
      Whether any op reads the copy.
    """
    read = False
    for op in tensor.consumers():
        # An Identity of int32 returns it in host memory on any device.
        if op.type == "Identity" and _is_on_host(op) and tensor.dtype != tf.int32:
            with tf.device("GPU:0"), tf.control_dependencies([op]):
                read |= read_copy(op.outputs[0], tf.identity(copy))
            continue
        for index in (index for index, each in enumerate(op.inputs) if each is tensor):
            if _reads_gpu_memory(op, index):
                op._update_input(index, copy)
                read = True
    return read


def copy_to_gpu(tensor: tf.Tensor) -> tf.Tensor:
    """Copy a tensor in host memory to the GPU beside the computation there, in the form of `to_caller`."""
    with tf.device("GPU:0"):
        return to_caller(load_op_library("ops").gmeta_to_gpu(column=tensor), "gpu")


_CALLS = frozenset(
    f"{prefix}{name}"
    for name in ("Case", "If", "PartitionedCall", "While")
    for prefix in ("", "Stateful", "Stateless")
)
_OF_SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})


def _reads_gpu_memory(op: tf.Operation, index: int) -> bool:
    """Return whether an op that TensorFlow places on a GPU reads its input ``index`` in the GPU's memory."""
    if op.type in _CALLS | _OF_SHAPES or _is_on_host(op):
        return False
    in_host_memory = _host_memory_of(op)
    return in_host_memory is not None and _name_of(op, op.op_def.input_arg, index) not in in_host_memory


def _is_in_gpu_memory(tensor: tf.Tensor) -> bool:
    """Return whether an op of a GPU writes a tensor to the GPU's memory; many int32 results aren't there."""
    if tf.executing_eagerly() or tensor.op.type == "Placeholder":  # an int32 argument is in host memory
        return False
    op = tensor.op
    in_host_memory = _host_memory_of(op)
    return (
        in_host_memory is not None
        and _name_of(op, op.op_def.output_arg, tensor.value_index) not in in_host_memory
    )


def _is_on_host(op: tf.Operation) -> bool:
    """Return whether an op is on the host by its device, another op's, or that of a resource that it uses."""
    if "CPU" in op.device or op.colocation_groups() != [b"loc:@" + op.name.encode()]:
        return True
    resources = [each for each in op.inputs if each.dtype == tf.resource]
    if not resources:
        return False
    captured = {id(inside): outside for outside, inside in getattr(op.graph, "captures", ())}
    return not all("GPU" in captured.get(id(each), each).device for each in resources)


def _host_memory_of(op: tf.Operation) -> frozenset[str] | None:
    """Return which arguments the op's kernel for GPUs has in host memory; None if it has no such kernel."""
    kernels_of = registered.get_registered_kernels_for_op(op.type).kernel
    for device in ("GPU", "DEFAULT"):
        for kernel in kernels_of:
            if kernel.device_type == device and all(_allows(op, each) for each in kernel.constraint):
                return frozenset(kernel.host_memory_arg)
    return None


def _allows(op: tf.Operation, constraint: Any) -> bool:
    """Return whether a kernel's constraint allows the op's dtypes; of other attributes it isn't known."""
    kinds = {attr.name: attr.type for attr in op.op_def.attr}
    if kinds.get(constraint.name) not in ("type", "list(type)"):
        return False
    dtypes = op.get_attr(constraint.name)
    dtypes = dtypes if isinstance(dtypes, list) else [dtypes]
    return all(each.as_datatype_enum in constraint.allowed_values.list.type for each in dtypes)


def _name_of(op: tf.Operation, args: Any, index: int) -> str:
    """Return the name of the argument that an op's input or output ``index`` belongs to."""
    for arg in args:
        parts = len(op.get_attr(arg.type_list_attr)) if arg.type_list_attr else 1
        index -= op.get_attr(arg.number_attr) if arg.number_attr else parts
        if index < 0:
            return str(arg.name)
    raise IndexError(index)


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
      tables: Source of the copies that lookups read; without it, lookups are refused.
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
    """Return the copy to read instead of the table; None outside `portable_ops`.

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

    If it computes on a GPU without a kernel for the case, it warns once for each reason: plain TensorFlow
    then builds every (length, length) matrix, on the GPU if they fit.

    Args:
      width: Width of a query and of a key; None: attention without queries and keys.
      values: Width of a value.
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
    """Explain why this build or this GPU has no kernels; "" if it has kernels."""
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
