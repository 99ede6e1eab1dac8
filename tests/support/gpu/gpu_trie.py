"""A level of a trie on the GPU, by the CUDA library's C interface, without TensorFlow."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from support.gpu.cuda_library import DeviceArray, Stream, call

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
    ) -> tuple[DeviceArray, ...]:
        """Take a step.

        Returns:
          Scores, nodes and beams, each (users, k).
        """
        return self._run(GpuTrieStep(self, logits, scores, nodes, k))

    def sample(
        self, logits: npt.ArrayLike, scores: npt.ArrayLike, nodes: npt.ArrayLike, noise: GpuTrieNoise
    ) -> tuple[DeviceArray, ...]:
        """Draw a child of each beam.

        Returns:
          Scores, nodes and beams, each (users, beams).
        """
        return self._run(GpuTrieStep(self, logits, scores, nodes, None, noise))

    def gumbel_step(
        self,
        logits: npt.ArrayLike,
        scores: npt.ArrayLike,
        ranks: npt.ArrayLike,
        nodes: npt.ArrayLike,
        k: int,
        noise: GpuTrieNoise,
    ) -> tuple[DeviceArray, ...]:
        """Take a step that draws without replacement.

        Returns:
          Scores, nodes, beams and ranks, each (users, k).
        """
        return self._run(GpuTrieStep(self, logits, scores, nodes, k, noise, ranks))

    @staticmethod
    def _run(step: GpuTrieStep) -> tuple[DeviceArray, ...]:
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


class _Noise(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in ("seed", "step", "keys")), ("level", ctypes.c_int64))


class GpuTrieNoise:
    """The noise of users in the GPU's memory, as in `gmeta.ops.trie_draws.TrieNoise`.

    Args:
      seed: An int64.
      step: An int64.
      level: The level of the nodes.
      keys: int64 (users,).
    """

    def __init__(self, seed: int, step: int, level: int, keys: npt.ArrayLike) -> None:
        self._arrays = [DeviceArray.of(each, np.int64) for each in ([seed], [step], keys)]
        self.struct = _Noise(*(each.pointer for each in self._arrays), level)


class GpuTrieStep:
    """A repeatable step whose arrays are in the GPU's memory.

    Args:
      level: The level of the nodes.
      logits: float32 (users, beams, codes).
      scores: float32 (users, beams).
      nodes: int64 (users, beams).
      k: The number of beams to keep; None: a sample, one for each beam.
      noise: The noise of the users, to draw; None: the k best are kept.
      ranks: float32 (users, beams), to draw k without replacement.

    Attributes:
      results: Scores, nodes and beams, (users, k); and ranks, if there are any.
    """

    def __init__(
        self,
        level: GpuTrieLevel,
        logits: npt.ArrayLike,
        scores: npt.ArrayLike,
        nodes: npt.ArrayLike,
        k: int | None,
        noise: GpuTrieNoise | None = None,
        ranks: npt.ArrayLike | None = None,
    ) -> None:
        self._kept = level, noise
        z, s, at = (
            DeviceArray.of(each, dtype) for each, dtype in zip((logits, scores, nodes), _DTYPES, strict=True)
        )
        self._inputs = [z, s, at]
        users, beams, _ = z.shape
        shape = users, beams if k is None else k
        self.results: tuple[DeviceArray, ...] = tuple(
            DeviceArray(shape, dtype) for dtype in (np.float32, np.int64, np.int32)
        )
        sizes = at.pointer, *z.shape, ctypes.byref(level.struct)
        by = () if noise is None else (ctypes.byref(noise.struct),)
        if ranks is not None:
            of_beams, scratch = DeviceArray.of(ranks, np.float32), DeviceArray(z.shape, np.float32)
            self._inputs += [of_beams, scratch]
            self.results += (DeviceArray(shape, np.float32),)
            self._name = "trie_gumbel_step"
            self._arguments = z.pointer, s.pointer, of_beams.pointer, *sizes, *by, k, scratch.pointer
        elif k is None:
            self._name, self._arguments = "trie_sample", (z.pointer, s.pointer, *sizes, *by)
        else:
            self._name, self._arguments = "trie_step", (z.pointer, s.pointer, *sizes, k)
        self._arguments += tuple(each.pointer for each in self.results)

    def run(self, stream: Stream | None) -> None:
        """Queue the step."""
        call(self._name, *self._arguments, None if stream is None else stream.handle)
