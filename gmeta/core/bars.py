"""Progress in the terminal: what all commands' bars have in common."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

B = TypeVar("B", bound="Bars")


class Bars:
    """Bars on standard error while the ``with`` block runs; on anything but a terminal none is drawn.

    Args:
      columns: What stands to the right of a bar and its "3/10".
      console: Where they are drawn, instead of standard error.

    Attributes:
      console: Where they are drawn.
      bars: rich's own, to add to and to move.
      drawn: Whether there are bars; otherwise a line may stand for one that is full.
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
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(text, highlight=False, soft_wrap=True)
