"""A level of a trie on the GPU, by the CUDA library's C interface, without TensorFlow."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from gmeta.testing.gpu.cuda_library import DeviceArray, Stream, call


class _Level(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("starts", "digits", "allowed")),
        *((name, ctypes.c_int64) for name in ("nodes", "children")),
    )


class GpuTrieLevel:
    """A level in the GPU's memory.

    Args:
      starts: int64 (nodes + 1,).
      digits: int32 (children,).
      allowed: bool (children,), or None.
    """

    def __init__(
        self,
        starts: npt.NDArray[np.int64],
        digits: npt.NDArray[np.int32],
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._starts, self._digits = DeviceArray.of(starts, np.int64), DeviceArray.of(digits, np.int32)
        self._allowed = None if allowed is None else DeviceArray.of(allowed, np.bool_)
        self.struct = _Level(
            self._starts.pointer,
            self._digits.pointer,
            None if self._allowed is None else self._allowed.pointer,
            len(starts) - 1,
            len(digits),
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
        self._level, self._k = level, k
        self._logits, self._scores = DeviceArray.of(logits, np.float32), DeviceArray.of(scores, np.float32)
        self._nodes = DeviceArray.of(nodes, np.int64)
        shape = self._logits.shape[0], k
        self.results = (
            DeviceArray(shape, np.float32),
            DeviceArray(shape, np.int64),
            DeviceArray(shape, np.int32),
        )

    def run(self, stream: Stream | None) -> None:
        """Queue the step."""
        call(
            "trie_step",
            self._logits.pointer,
            self._scores.pointer,
            self._nodes.pointer,
            *self._logits.shape,
            ctypes.byref(self._level.struct),
            self._k,
            *(each.pointer for each in self.results),
            None if stream is None else stream.handle,
        )
