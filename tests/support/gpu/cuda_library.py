"""The CUDA library by its C interface, without TensorFlow: the base of tests and benchmarks of kernels.

Arrays are in device memory that the CUDA driver allocates, so that they require no other framework.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_PACKAGE = importlib.util.find_spec("gmeta")  # not imported: it needs TensorFlow
_LIBRARY = Path(_PACKAGE.origin if _PACKAGE and _PACKAGE.origin else ".").parent / "ops" / "_gmeta_cuda.so"
_SOURCES = Path(__file__).resolve().parents[3] / "ops"


class CudaError(RuntimeError):
    """A function of the library failed.

    Attributes:
      status: Its ``gmeta_cuda_status``.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status


def library_path() -> Path:
    """The library; ``GMETA_CUDA_LIBRARY`` names another."""
    return Path(os.environ.get("GMETA_CUDA_LIBRARY", _LIBRARY))


def why_missing() -> str | None:
    """Why kernels can't run here, or None if they can."""
    if not library_path().is_file():
        return f"{library_path()} isn't built: it needs a CUDA compiler"
    try:
        return None if _driver().gpus > 0 else "there is no GPU"
    except OSError:
        return "there is no CUDA driver"


def count_gpus() -> int:
    """The number of GPUs that the CUDA driver shows to this process."""
    return 0 if why_missing() else _driver().gpus


def count_gpus_apart() -> int:
    """Return the number of GPUs, counted by another process: one that has touched a GPU can't be forked."""
    count = f"from {__name__} import count_gpus; print(count_gpus())"
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=False)
    return int(done.stdout or 0)


@cache
def library() -> ctypes.CDLL:
    """The library; its functions return a status or a number."""
    loaded = ctypes.CDLL(str(library_path()))
    loaded.gmeta_cuda_error.restype = ctypes.c_char_p
    for name in ("unique_workspace", "order_by_owner_workspace", "segment_sum_workspace"):
        getattr(loaded, f"gmeta_gpu_{name}").restype = ctypes.c_size_t
    return loaded


@cache
def parameter_counts() -> dict[str, int]:
    """The number of parameters of each function, as the headers ``*_abi.h`` declare it."""
    found = {}
    for header in sorted(_SOURCES.rglob("*_abi.h")):
        code = re.sub(r"//.*", "", header.read_text())
        for name, parameters in re.findall(r"GMETA_CUDA_API[^;(]*?\b(gmeta_\w+)\(([^)]*)\)", code):
            found[name] = 0 if parameters.strip() in ("", "void") else parameters.count(",") + 1
    return found


def call_library(name: str, *arguments: Any) -> None:
    """Call ``gmeta_<name>``, with arguments of ctypes' types.

    Raises:
      TypeError: The header declares another number of parameters.
      CudaError: It failed.
    """
    if len(arguments) != (count := parameter_counts()[f"gmeta_{name}"]):
        raise TypeError(f"gmeta_{name} has {count} parameters, and is called with {len(arguments)}")
    status = getattr(library(), f"gmeta_{name}")(*arguments)
    if status != 0:
        raise CudaError(status, library().gmeta_cuda_error().decode())


def call(name: str, *arguments: Any) -> None:
    """Call ``gmeta_gpu_<name>``. Integers are passed as int64, floats as float32.

    Raises:
      CudaError: It failed.
    """
    typed = [
        ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_float(a) if isinstance(a, float) else a
        for a in arguments
    ]
    call_library(f"gpu_{name}", *typed)


class _Driver:
    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._context: ctypes.c_void_p | None = None
        count, context = ctypes.c_int(0), ctypes.c_void_p()
        self.gpus = 0
        if self._cuda.cuInit(0) != 0 or self._cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return
        self.gpus = count.value
        if self.gpus > 0:
            self.run("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
            self._context = context

    def run(self, name: str, *arguments: Any) -> None:
        if self._context is not None:  # each thread has its own current context
            self._cuda.cuCtxSetCurrent(self._context)
        status = getattr(self._cuda, name)(*arguments)
        if status != 0:
            raise CudaError(status, name)


@cache
def _driver() -> _Driver:
    return _Driver()


class Stream:
    """A CUDA stream, to be passed to `call`."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        _driver().run("cuStreamCreate", ctypes.byref(self.handle), 1)  # waits for no other stream

    def __del__(self) -> None:
        if self.handle:
            _driver().run("cuStreamDestroy_v2", self.handle)


class Event:
    """A moment of a stream's work."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        _driver().run("cuEventCreate", ctypes.byref(self._handle), 0)

    def __del__(self) -> None:
        if self._handle:
            _driver().run("cuEventDestroy_v2", self._handle)

    def record(self, stream: Stream) -> None:
        """Set the moment to the end of the stream's present work."""
        _driver().run("cuEventRecord", self._handle, stream.handle)

    def seconds_since(self, before: Event) -> float:
        """Wait for the moment, and return its time after another one."""
        milliseconds = ctypes.c_float()
        _driver().run("cuEventSynchronize", self._handle)
        _driver().run("cuEventElapsedTime", ctypes.byref(milliseconds), before._handle, self._handle)
        return milliseconds.value / 1000


def synchronize() -> None:
    """Wait for all work on the GPU."""
    _driver().run("cuCtxSynchronize")


class DeviceArray:
    """A NumPy array's copy on the GPU.

    Args:
      shape: Its shape.
      dtype: Its type.
      poison: The byte that fills it, which shows what a kernel doesn't write.
    """

    def __init__(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike, poison: int = 0xCD) -> None:
        self.shape = (shape,) if isinstance(shape, int) else shape
        self.dtype = np.dtype(dtype)
        self.bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self._address = ctypes.c_uint64(0)
        _driver().run("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(max(self.bytes, 1)))
        self.fill(poison)

    @classmethod
    def of(cls, values: npt.ArrayLike, dtype: npt.DTypeLike) -> DeviceArray:
        """A copy of ``values``."""
        array = np.ascontiguousarray(values, dtype)
        made = cls(array.shape, dtype)
        source = array.ctypes.data_as(ctypes.c_void_p)
        _driver().run("cuMemcpyHtoD_v2", made._address, source, ctypes.c_size_t(made.bytes))
        return made

    def __del__(self) -> None:
        if self._address.value:
            _driver().run("cuMemFree_v2", self._address)

    @property
    def pointer(self) -> ctypes.c_void_p:
        """Its address, to be passed to `call`."""
        return ctypes.c_void_p(self._address.value)

    def fill(self, byte: int) -> None:
        """Set all bytes."""
        _driver().run("cuMemsetD8_v2", self._address, ctypes.c_ubyte(byte), ctypes.c_size_t(self.bytes))

    def numpy(self) -> npt.NDArray[Any]:
        """A copy on the host, after all work on the GPU."""
        synchronize()
        array = np.empty(self.shape, self.dtype)
        target = array.ctypes.data_as(ctypes.c_void_p)
        _driver().run("cuMemcpyDtoH_v2", target, self._address, ctypes.c_size_t(self.bytes))
        return array
