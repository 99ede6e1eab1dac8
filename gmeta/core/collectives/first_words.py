"""Lets a rank that fails say why in its first line, before any traceback."""

from __future__ import annotations

import sys
from types import TracebackType

from gmeta.core.errors import GmetaError


def say_errors_first(rank: int, size: int) -> None:
    """From now on, begin the report of an error of gmeta's that ends this process with its one line.

    Python's traceback begins with what came before it, such as Horovod's own error, and ends with it; among
    the output of several ranks the end is hard to find.

    Args:
      rank: This rank.
      size: How many there are.
    """
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, GmetaError):
            sys.stderr.write(f"gmeta: error on rank {rank} of {size}: {error}\n")
            sys.stderr.flush()
        usual(kind, error, traceback)

    sys.excepthook = hook
