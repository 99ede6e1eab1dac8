"""Progress bars in the terminal, which all commands share."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

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
        if self.drawn:  # rich before 15 ends bars that it has not drawn with an empty line
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
