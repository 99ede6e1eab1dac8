"""The device of a table: host memory or the memory of a GPU."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import build_info, library_path

Device = Literal["auto", "cpu", "gpu"]
"""A requested device. ``"auto"`` is the value of the environment variable `VARIABLE`, or else ``"cpu"``."""
VARIABLE = "GMETA_TABLE_DEVICE"
Place = Literal["cpu", "gpu"]
"""The device that a table actually uses."""

DEVICE_NAMES: dict[Place, str] = {"cpu": "CPU:0", "gpu": "GPU:0"}
"""Device -> its name for `tf.device`. A process uses the first of the GPUs that it sees."""


def asked_place(device: str, owner: str) -> Place:
    """Return the device that is requested for a table, whether or not it is there.

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


def place_of(device: str, owner: str) -> Place:
    """Choose the device on which to make a table.

    If a GPU is requested but there is none, or gmeta was built without CUDA, the table is kept in host
    memory, with one warning for each reason. It holds and computes the same there.

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


def compute_place() -> Place:
    """Return where a process computes with the rows of a lookup: on the GPU if it sees one."""
    return "gpu" if tf.config.get_visible_devices("GPU") else "cpu"


@functools.cache
def why_no_gpu() -> str:
    """Explain why tables can't be on a GPU in this process; "" if they can."""
    if build_info(library_path("ops"))["cuda"] != "1":
        return "gmeta was built without CUDA: put nvcc on PATH and build again with GMETA_CUDA=ON"
    if not tf.config.list_logical_devices("GPU"):
        return "TensorFlow sees no GPU"
    return ""


@functools.cache
def warn_once(reason: str) -> None:
    """Warn that a table stays in host memory, once for each reason."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"device='gpu': {reason}. Tables are kept in host memory instead", stacklevel=level)


def _is_inside(module: str) -> bool:
    """Return whether a module isn't the user's own. The warning should point at the user's line."""
    return module.split(".")[0] in ("gmeta", "tensorflow", "tf_keras")
