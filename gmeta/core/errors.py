"""The errors that gmeta raises on purpose.

Each message states what was received, where (file and line or offset, feature, rank), and what to do next.
The command line prints such an error in one line and exits with ``exit_code``; any other error is a bug in
gmeta and keeps its traceback.
"""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_FRAMEWORKS = frozenset({"gmeta", "tensorflow", "tf_keras", "contextlib"})


class GmetaError(Exception):
    """Base of every error that the user can fix."""

    exit_code = 2
    # These pass the error unchanged out of a traced graph or a layer's call. Otherwise, AutoGraph would
    # convert it to another class, with twenty lines of framework code before the message, and Keras would
    # append all tensors.
    ag_pass_through = True
    _keras_call_info_injected = True


class ConfigError(GmetaError, ValueError):
    """A setting that can't be used, or two that contradict each other."""


class CollectiveError(GmetaError, RuntimeError):
    """Ranks of a job that can't continue together: one ended, hung, or called another collective."""


class RanksError(GmetaError, RuntimeError):
    """A job of several ranks that failed.

    Args:
      message: What happened; it starts with the rank and the reason.
      ends: How each rank ended, in order (`gmeta.core.launcher.local_ranks.RankEnd`).
    """

    def __init__(self, message: str, *, ends: Sequence[Any] = ()) -> None:
        self.ends = tuple(ends)
        super().__init__(message)


class KerasError(GmetaError, ImportError):
    """Keras 3, with which gmeta can't train: TensorFlow selected it, or one of its objects was passed."""


class StoreError(GmetaError, RuntimeError):
    """A feature store that refused a request, or that holds unreadable data."""


class StoreUnavailableError(StoreError):
    """A feature store that didn't answer: unlike after a refused request, a retry may help."""


class NotFiniteError(GmetaError, ArithmeticError):
    """A loss, a gradient, weights or rows that hold NaN or infinity."""


class NativeLibraryError(GmetaError, ImportError):
    """A compiled library is missing, broken, or built against another TensorFlow."""


class DataError(GmetaError, ValueError):
    """A record that doesn't follow the stated format.

    Args:
      message: What was received and what was expected.
      path: The file that holds the record.
      line: The record's line, counted from 1, in a text file.
      offset: The record's byte offset in a binary file.
      advice: What to do next, in addition to fixing the file.

    Example:
      >>> str(DataError("4 fields expected, got 3", path="u.data", line=7))
      'u.data:7: 4 fields expected, got 3'
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        line: int | None = None,
        offset: int | None = None,
        advice: str | None = None,
    ) -> None:
        self.path, self.line, self.offset = path, line, offset
        where = "" if path is None else str(path)
        if line is not None:
            where += f":{line}"
        if offset is not None:
            where += f" at byte {offset}"
        text = f"{where}: {message}" if where else message
        super().__init__(f"{text}; {advice}" if advice else text)


def is_framework(module: str) -> bool:
    """Return whether a module is gmeta's, Keras' or TensorFlow's own."""
    return module.partition(".")[0] in _FRAMEWORKS


def warn_caller(message: str) -> None:
    """Issue a warning at the calling line outside gmeta, Keras and TensorFlow."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and is_framework(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


_AROUND = re.compile(r"^\s*\(\d+\) [A-Z_]+:\s*|^\{\{function_node [^}]*\}\}\s*|\s*\[Op:\w+\].*$")


def without_ops(line: str) -> str:
    """Remove what TensorFlow writes around an error: its number among several, and the names of ops."""
    return _AROUND.sub("", line)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text `without_ops`, or its class's name if it has none."""
    return without_ops((str(error).splitlines() or [type(error).__name__])[0])


# Checks a caller's numbers; the error shows the received value.


def whole_number(what: str, value: Any, least: int = 0) -> int:
    """Return a whole number of at least ``least`` as an int; NumPy integers are accepted.

    Args:
      what: What to call it in the error.
      value: The value that was given.
      least: The smallest number allowed.

    Raises:
      ConfigError: The value is something else: a smaller number, a float, a text, True or False.

    Example:
      >>> whole_number("fit: steps", 3)
      3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{what} must be a whole number from {least} on, got {value!r}")
    return int(value)


def finite_number(what: str, value: Any) -> float:
    """Return a number that is neither infinite nor NaN as a float; NumPy numbers are accepted.

    Args:
      what: What to call it in the error.
      value: The value that was given.

    Raises:
      ConfigError: The value is something else, such as a text, a schedule or a tensor.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{what} must be a finite number, got {value!r}")
    return float(value)


def rows_not_finite(rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return which rows of a matrix hold NaN or infinity, in ascending order.

    Example:
      >>> rows_not_finite(np.array([[1.0, 2.0], [np.nan, 3e38]])).tolist()
      [1]
    """
    import numpy as np

    given = np.asarray(rows)
    with np.errstate(over="ignore", invalid="ignore"):  # one pass; rows with huge numbers are then reread
        doubtful = np.flatnonzero(~np.isfinite(np.einsum("ij,ij->i", given, given)))
    return doubtful[~np.isfinite(given[doubtful]).all(axis=1)]
