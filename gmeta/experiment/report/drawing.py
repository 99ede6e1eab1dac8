"""A figure of the report with its words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawing:
    """A figure, the name of its file without suffix, what it shows, and how to read it."""

    name: str
    title: str
    caption: str
    figure: Figure
