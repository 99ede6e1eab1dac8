"""Shared by the ranks of the GRM's benchmark: the start, a time limit, and peaks of memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import gmeta
from gmeta.core import collectives
from gmeta.training.token_limit import peak_memory

import tensorflow as tf
from parts.jobs import job_arguments

OUT_OF_MEMORY = "memory ended"
"""The message of a rank that ran out of memory."""
_SAYINGS = ("oom when", "out of memory", "out_of_memory", "resource_exhausted", "resourceexhausted")


def run(measure: Callable[[Mapping[str, Any], Callable[[Any], None]], None]) -> None:
    """Become a rank, and measure.

    Args:
      measure: Takes the settings, and a function that takes all results so far; rank 0 writes them, so that
        they remain if the job is ended.
    """
    out, settings = job_arguments()
    here = gmeta.init()
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")

    def note(found: Any) -> None:
        if here.rank == 0:
            partial = out.with_suffix(".part")
            partial.write_text(json.dumps(found))
            partial.replace(out)

    try:
        measure(settings, note)
    except Exception as error:
        if says_memory_ended(f"{type(error).__name__}: {error}"):
            raise SystemExit(f"{OUT_OF_MEMORY}: {str(error).splitlines()[-1][:200]}") from error
        raise


def says_memory_ended(text: str) -> bool:
    """Whether an error means that memory ran out."""
    return any(saying in text.lower() for saying in (*_SAYINGS, OUT_OF_MEMORY))


class Limit:
    """Ends rounds when time is up; rank 0 decides for all ranks.

    Args:
      seconds: The time from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    def is_over(self) -> bool:
        """Whether time is up; all ranks must call it together."""
        return bool(collectives.allgather_objects(time.perf_counter() > self._end)[0])


class Peaks:
    """The most memory that TensorFlow's allocator uses on the GPU, above its use before.

    It excludes weights and the optimizer's slots, which exist before, and rows of tables on the GPU, which
    have their own memory. Without a GPU nothing is counted.

    Attributes:
      bytes: Name -> the most bytes of its calls.
    """

    def __init__(self) -> None:
        self.bytes: dict[str, float] = {}
        self._measure = peak_memory("GPU:0") if tf.config.list_logical_devices("GPU") else None

    def run(self, name: str, action: Callable[[], Any]) -> Any:
        """Call a function, and return its result."""
        if self._measure is None:
            return action()
        found: list[Any] = []
        before = float(tf.config.experimental.get_memory_info("GPU:0")["current"])
        peak = self._measure(lambda: found.append(action()))
        self.bytes[name] = max(peak - before, self.bytes.get(name, 0.0))
        return found[0]
