"""Where a table is kept: in host memory, or in a GPU's."""

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
"""What may be asked for. ``"auto"`` is what the variable `VARIABLE` says, and without it ``"cpu"``."""
VARIABLE = "GMETA_TABLE_DEVICE"
Place = Literal["cpu", "gpu"]
"""What a table then has."""

DEVICE_NAMES: dict[Place, str] = {"cpu": "CPU:0", "gpu": "GPU:0"}
"""As `tf.device` takes them: of the GPUs that a process sees, it works on the first."""


def place_of(device: str, owner: str) -> Place:
    """Where a table is to be made.

    A table that asks for a GPU where there is none, or where gmeta was built without CUDA, is kept in host
    memory, with one warning for each reason: it holds and computes the same.

    Args:
      device: What was asked for.
      owner: Whose it is, for messages.

    Raises:
      ConfigError: ``device`` is none of `Device`.
    """
    if device == "auto":
        device = os.environ.get(VARIABLE, "cpu")
        owner = f"{VARIABLE}, {owner}"
    if device not in get_args(Device):
        raise ConfigError(f"{owner}: device must be one of {', '.join(get_args(Device))}, got {device!r}")
    if device != "gpu":
        return "cpu"
    reason = why_no_gpu()
    if reason:
        warn_once(reason)
    return "cpu" if reason else "gpu"


def compute_place() -> Place:
    """Where a process computes with the rows of a lookup: on the GPU if it sees one."""
    return "gpu" if tf.config.get_visible_devices("GPU") else "cpu"


@functools.cache
def why_no_gpu() -> str:
    """Why tables can't be on a GPU in this process; "" where they can."""
    if build_info(library_path("ops"))["cuda"] != "1":
        return "gmeta was built without CUDA: put nvcc on PATH and build again"
    if not tf.config.list_logical_devices("GPU"):
        return "TensorFlow sees no GPU"
    return ""


@functools.cache
def warn_once(reason: str) -> None:
    """Say that a table stays in host memory, once for each reason."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"device='gpu': {reason}. Tables are kept in host memory instead", stacklevel=level)


def _is_inside(module: str) -> bool:
    """Whether it isn't the user's, who is to see which line of his asks for a GPU."""
    return module.split(".")[0] in ("gmeta", "tensorflow", "tf_keras")
