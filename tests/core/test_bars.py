"""Bars on a terminal, and nothing but what is said elsewhere."""

import io

import pytest
from rich.console import Console
from rich.progress import TextColumn

from gmeta.core.terminal import Bars


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_drawn_on_a_terminal_alone(terminal):
    out = io.StringIO()
    with Bars(TextColumn("apples"), console=Console(file=out, force_terminal=terminal, width=100)) as bars:
        task = bars.bars.add_task("counting", total=10)
        bars.bars.update(task, completed=3)
        bars.say("by the way")
    drawn = all(text in out.getvalue() for text in ("counting", "3/10", "apples"))
    assert drawn == bars.drawn == terminal
    assert "by the way\n" in out.getvalue()
    if not terminal:
        assert out.getvalue().strip() == "by the way"
