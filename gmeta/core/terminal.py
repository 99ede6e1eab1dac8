"""Terminal output of commands: progress bars, tables of methods, and findings of checks."""

from __future__ import annotations

import enum
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

B = TypeVar("B", bound="Bars")


class Bars:
    """Progress bars on standard error while the ``with`` block runs; only a terminal shows them.

    Args:
      columns: Columns to the right of a bar and its "3/10".
      console: Where the bars are drawn, instead of standard error.

    Attributes:
      console: Where the bars are drawn.
      bars: rich's `Progress`, through which callers add and move bars.
      drawn: Whether bars are drawn; if not, a caller may print a line for each full bar instead.
    """

    def __init__(self, *columns: ProgressColumn, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.drawn = self.console.is_terminal
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            *columns,
            console=self.console,
            disable=not self.drawn,
        )

    def __enter__(self: B) -> B:
        if self.drawn:  # rich before 15 prints an empty line after bars that it has not drawn
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.drawn:
            self.bars.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, highlight=False, soft_wrap=True)


# Ctrl-C, recorded until the program ends because of it.
#
# Python raises KeyboardInterrupt wherever the main thread currently is. That may be Python code called from
# C++, for example when TensorFlow inspects a type or leaves a scope; such a caller may clear the error and
# continue, or fail with another one. In a job of many short steps, this happens once in a few hundred
# interrupts.

__all__ = ["Interrupts", "remember_interrupts"]


class Interrupts:
    """The interrupts that `remember_interrupts` recorded.

    Attributes:
      came: Whether there was an interrupt.
    """

    def __init__(self) -> None:
        self.came = False

    def raise_again(self) -> None:
        """Raise a recorded interrupt.

        Raises:
          KeyboardInterrupt: There was an interrupt, and the program has continued.
        """
        if self.came:
            raise KeyboardInterrupt


@contextmanager
def remember_interrupts() -> Iterator[Interrupts]:
    """Record each interrupt within a ``with`` block; it is still raised as usual.

    Only the main thread receives interrupts. In other threads, and if the process ignores interrupts, nothing
    is recorded.

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


Rows = Sequence[tuple[str, bool, Sequence[tuple[str, bool]]]]
"""Lines of a table of methods: label, whether a part begins, and cells: text, and whether it is the best."""


def method_table(title: str, header: Sequence[str], rows: Rows, kept: Sequence[str]) -> Table:
    """Build a table of methods and baselines whose best cells are bold and starred, for logs without bold.

    Args:
      title: The title.
      header: The titles of the cells' columns.
      rows: The rows.
      kept: Which of these columns to show.
    """
    found = Table(
        title=title,
        caption="* best; methods and baselines in the order of validation",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    found.add_column("method", no_wrap=True)
    for name in kept:
        found.add_column(f"{name} ", justify="right", no_wrap=True)
    for label, begins, cells in rows:
        if begins and found.rows:
            found.add_section()
        shown = [cells[header.index(name)] for name in kept]
        texts = [
            Text(text, "bold green" if best else "").append("*" if best else " ") for text, best in shown
        ]
        found.add_row(label, *texts)
    return found


class Status(enum.Enum):
    """The outcome of a check."""

    OK = "ok"
    NOTE = "note"  # worth knowing; gmeta works without it
    BROKEN = "BROKEN"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      subject: The thing that was checked, such as ``tensorflow`` or ``library ops``.
      value: What was found.
      status: Whether that is good.
      remedy: What to do about it, if anything.
    """

    subject: str
    value: str
    status: Status = Status.OK
    remedy: str | None = None
