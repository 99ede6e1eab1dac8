"""A level of a trie on the GPU, by the CUDA library's C interface, without TensorFlow."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from gmeta.testing.gpu.cuda_library import DeviceArray, Stream, call

_DTYPES = (np.float32, np.float32, np.int64)  # of logits, scores and nodes


class _Level(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "digits", "allowed")),
        *((name, ctypes.c_int64) for name in ("nodes", "children")),
        ("wide_digits", ctypes.c_void_p),
    )


class GpuTrieLevel:
    """A level in the GPU's memory.

    Args:
      starts: int64 (nodes + 1,).
      digits: int32 or int64 (children,).
      allowed: bool (children,), or None.
    """

    def __init__(
        self,
        starts: npt.NDArray[np.int64],
        digits: npt.NDArray[np.int32] | npt.NDArray[np.int64],
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        wide = digits.dtype == np.int64
        self._starts = DeviceArray.of(starts, np.int64)
        self._digits = DeviceArray.of(digits, np.int64 if wide else np.int32)
        self._allowed = None if allowed is None else DeviceArray.of(allowed, np.bool_)
        self.struct = _Level(
            self._starts.pointer,
            None if wide else self._digits.pointer,
            None if self._allowed is None else self._allowed.pointer,
            len(starts) - 1,
            len(digits),
            self._digits.pointer if wide else None,
        )

    def step(
        self, logits: npt.ArrayLike, scores: npt.ArrayLike, nodes: npt.ArrayLike, k: int
    ) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
        """Take a step.

        Returns:
          Scores, nodes and beams, each (users, k).
        """
        step = GpuTrieStep(self, logits, scores, nodes, k)
        step.run(None)
        return step.results

    def log_probs(
        self,
        logits: npt.ArrayLike,
        nodes: npt.ArrayLike,
        children: npt.ArrayLike,
        upstream: npt.ArrayLike,
    ) -> tuple[DeviceArray, DeviceArray]:
        """Compute logs of probabilities, and the gradient of logits under ``upstream``."""
        z = DeviceArray.of(logits, np.float32)
        at, to = DeviceArray.of(nodes, np.int64), DeviceArray.of(children, np.int64)
        of_y, y = DeviceArray.of(upstream, np.float32), DeviceArray(z.shape[0], np.float32)
        of_z = DeviceArray(z.shape, np.float32)
        rows = z.pointer, at.pointer, to.pointer, *z.shape, ctypes.byref(self.struct)
        call("trie_log_probs", *rows, y.pointer, None)
        call("trie_log_probs_gradient", of_y.pointer, *rows, of_z.pointer, None)
        return y, of_z


class GpuTrieStep:
    """A step whose arrays are in the GPU's memory, to be taken again and again.

    Args:
      level: The level of the nodes.
      logits: float32 (users, beams, codes).
      scores: float32 (users, beams).
      nodes: int64 (users, beams).
      k: How many beams to keep.
    """

    def __init__(
        self,
        level: GpuTrieLevel,
        logits: npt.ArrayLike,
        scores: npt.ArrayLike,
        nodes: npt.ArrayLike,
        k: int,
    ) -> None:
        self._level = level
        self._inputs = [
            DeviceArray.of(each, dtype) for each, dtype in zip((logits, scores, nodes), _DTYPES, strict=True)
        ]
        shape = self._inputs[0].shape[0], k
        self.results = (
            DeviceArray(shape, np.float32),
            DeviceArray(shape, np.int64),
            DeviceArray(shape, np.int32),
        )
        pointers = [each.pointer for each in self._inputs], [each.pointer for each in self.results]
        sizes = self._inputs[0].shape
        self._arguments = *pointers[0], *sizes, ctypes.byref(level.struct), k, *pointers[1]

    def run(self, stream: Stream | None) -> None:
        """Queue the step."""
        call("trie_step", *self._arguments, None if stream is None else stream.handle)
