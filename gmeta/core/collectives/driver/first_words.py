"""Makes a failing rank print its error in one line, before any traceback."""

from __future__ import annotations

import sys
from types import TracebackType

from gmeta.core.errors import GmetaError


def say_errors_first(rank: int, size: int) -> None:
    """Print a gmeta error that ends this process in one line, before its traceback.

    Python's traceback begins with the errors that led to this one, such as Horovod's own, and ends with this
    one; that end is hard to find among the output of several ranks.

    Args:
      rank: This rank.
      size: How many ranks there are.
    """
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, GmetaError):
            sys.stderr.write(f"gmeta: error on rank {rank} of {size}: {error}\n")
            sys.stderr.flush()
        usual(kind, error, traceback)

    sys.excepthook = hook
