"""Ctrl-C, remembered until the program has ended because of it.

Python raises KeyboardInterrupt wherever the main thread is just then. That may be Python code which C++ has
called, as TensorFlow does to look at a type or to leave a scope; such a caller may clear the error and go on,
or fail with another one. In a job of many short steps this happens once in some hundred times.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts", "remember_interrupts"]


class Interrupts:
    """What `remember_interrupts` has seen.

    Attributes:
      came: Whether there was an interrupt.
    """

    def __init__(self) -> None:
        self.came = False

    def raise_again(self) -> None:
        """Raise what was swallowed.

        Raises:
          KeyboardInterrupt: There was an interrupt, and yet the program goes on.
        """
        if self.came:
            raise KeyboardInterrupt


@contextmanager
def remember_interrupts() -> Iterator[Interrupts]:
    """Note each interrupt within a ``with`` block; it is raised as before, too.

    Only the main thread gets interrupts. In other threads, and where the process ignores interrupts, nothing
    is noted.

    Example:
      ::

        with remember_interrupts() as interrupts:
            for batch in batches:
                interrupts.raise_again()
                train(batch)
    """
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupts
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.came = True
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
