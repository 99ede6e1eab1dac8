"""The most memory that was in use on a device while something ran, and how much there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf
from tensorflow.python.client import device_lib

from gmeta.core.errors import ConfigError

PeakMemory: TypeAlias = Callable[[Callable[[], object]], float]
"""Calls its argument, and returns the most bytes that were in use meanwhile."""


def peak_memory(device: str) -> PeakMemory:
    """Return a measure of what TensorFlow's allocator has handed out on a device.

    Args:
      device: Such as ``"GPU:0"``.

    Raises:
      ConfigError: The device is no GPU of this process. Of a CPU's memory TensorFlow counts parts at most.
    """
    _check_statistics(device)

    def measure(run: Callable[[], object]) -> float:
        tf.config.experimental.reset_memory_stats(device)
        run()
        return float(tf.config.experimental.get_memory_info(device)["peak"])

    return measure


def memory_limit(device: str) -> float:
    """Return the bytes that TensorFlow's allocator may hand out on a device.

    Raises:
      ConfigError: As for `peak_memory`.
    """
    name = _check_statistics(device)
    limits = {found.name: found.memory_limit for found in device_lib.list_local_devices()}
    return float(limits[f"/device:{name}"])


def _check_statistics(device: str) -> str:
    """Return the device's short name, such as ``GPU:0``."""
    name = device.upper().removeprefix("/").removeprefix("DEVICE:")
    there = [found.name.removeprefix("/physical_device:") for found in tf.config.list_physical_devices("GPU")]
    if name not in there:
        raise ConfigError(
            f"max_tokens: TensorFlow counts no memory of {device} (GPUs: {', '.join(there) or 'none'}): pass "
            "memory=, a function that calls its argument and returns the most bytes in use meanwhile, and "
            "limit=, in bytes"
        )
    return name
