"""The product that is activated as it is written, by the library's C interface: inputs, calls, formulas.

It uses PyTorch, which nothing else in gmeta needs, for memory on the GPU and for the expected numbers.
"""

from __future__ import annotations

import ctypes
from typing import Any

from support.gpu.cuda_library import call_library


class _Projection(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "inner", "columns", "activated_from")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "w", "z", "activated")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class GpuProjection:
    """Random matrices on the GPU, and the calls of the library.

    Args:
      rows: The rows of X.
      inner: The columns of X and rows of W.
      columns: The columns of W.
      activated_from: The first activated column.
      dtype: Its name, ``"bfloat16"`` or ``"float16"``.
      seed: The seed of the matrices.
    """

    def __init__(
        self, rows: int, inner: int, columns: int, activated_from: int, dtype: str, seed: int = 0
    ) -> None:
        import torch  # type: ignore[import-not-found,unused-ignore]

        self.torch: Any = torch
        self.activated_from, self.dtype = activated_from, getattr(torch, dtype)
        torch.manual_seed(seed)
        self.x = torch.randn(rows, inner, device="cuda").to(self.dtype)
        self.w = (torch.randn(inner, columns, device="cuda") / inner**0.5).to(self.dtype)
        self.z, self.activated = self._poison(columns), self._poison(columns - activated_from)

    def _poison(self, columns: int) -> Any:
        return self.torch.full((len(self.x), columns), self.torch.nan, dtype=self.dtype, device="cuda")

    def run(self) -> tuple[Any, Any]:
        """Z and its activated columns."""
        pointers = (each.data_ptr() for each in (self.x, self.w, self.z, self.activated))
        sizes = (*self.w.shape, self.activated_from, len(self.x))
        call_library(
            "silu_projection", ctypes.byref(_Projection(self._dtype(), *sizes, *pointers)), self._stream()
        )
        return self.z, self.activated

    def activate(self) -> Any:
        """The same from Z in a separate pass."""
        columns = self.z.shape[1]
        call_library(
            "silu",
            ctypes.c_int32(self._dtype()),
            ctypes.c_int64(len(self.z)),
            ctypes.c_int32(columns - self.activated_from),
            _Rows(self.z[:, self.activated_from :].data_ptr(), columns),
            _Rows(self.activated.data_ptr(), columns - self.activated_from),
            self._stream(),
        )
        return self.activated

    def apart(self) -> tuple[Any, Any]:
        """Both by the product of PyTorch's library and `activate`."""
        self.torch.matmul(self.x, self.w, out=self.z)
        return self.z, self.activate()

    def _dtype(self) -> int:
        return 0 if self.dtype == self.torch.bfloat16 else 1

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.torch.cuda.current_stream().cuda_stream)
