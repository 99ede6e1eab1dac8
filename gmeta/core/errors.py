"""The errors that gmeta raises on purpose.

Each message says what was received, where (file and line or offset, feature, rank), and what to do next.
The command line prints them in one line and exits with ``exit_code``; anything else is a defect in gmeta
and keeps its traceback.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


class GmetaError(Exception):
    """Base of every error that is the user's to mend."""

    exit_code = 2
    # Raised while a graph is traced, or in a layer's call, it comes out as it is. AutoGraph would make an
    # error of another class of it, with twenty lines of framework code before the message; Keras would add
    # all tensors.
    ag_pass_through = True
    _keras_call_info_injected = True


class ConfigError(GmetaError, ValueError):
    """A setting that can't be used, or two that contradict each other."""


class CollectiveError(GmetaError, RuntimeError):
    """Ranks of a job that can't go on together: one ended, hung, or called another collective."""


class RanksError(GmetaError, RuntimeError):
    """A job of several ranks that didn't end well.

    Args:
      message: The rank and the reason first.
      ends: How each rank ended, in order (`gmeta.core.collectives.launcher.local_ranks.RankEnd`).
    """

    def __init__(self, message: str, *, ends: Sequence[Any] = ()) -> None:
        self.ends = tuple(ends)
        super().__init__(message)


class KerasError(GmetaError, ImportError):
    """TensorFlow has already chosen Keras 3, which gmeta can't train with."""


class StoreError(GmetaError, RuntimeError):
    """A feature store that refused a request, or holds what can't be read."""


class StoreUnavailableError(StoreError):
    """A feature store that didn't answer: worth another try, unlike a request that it refused."""


class NotFiniteError(GmetaError, ArithmeticError):
    """A gradient that holds NaN or infinity."""


class NativeLibraryError(GmetaError, ImportError):
    """A compiled library is missing, broken, or built against another TensorFlow."""


class DataError(GmetaError, ValueError):
    """A record that breaks the stated form.

    Args:
      message: What was received and what was expected.
      path: The file it is in.
      line: Its line, counted from 1, in a text file.
      offset: Its byte offset in a binary file.
      advice: What to do next, if there is more to say than to mend the file.

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
