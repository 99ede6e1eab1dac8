"""What every benchmark shares: interleaved timing, results with peers, a table and JSON.

These machines are shared and noisy, so a number alone says little. Contenders are timed in turn, round after
round, in one process; the median is reported, and the ratio to a peer in the same rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROUNDS = 7
"""At least five, so that a median leaves out two outliers on either side."""

WARM_UP = 2
"""Untimed rounds first."""

_HIGHER_IS_BETTER = ("/s",)


@dataclass(frozen=True)
class Result:
    """One figure, alone or with a peer's.

    Attributes:
      name: A path from the general to the particular, such as ``table/lookup/uniform/dim64/rows10M``.
      value: The figure.
      unit: Its unit; a rate ends in ``/s``.
      peer: What it is compared with.
      peer_value: The peer's figure in the same unit; None if the peer isn't installed.
    """

    name: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer: larger for a rate, smaller for anything else."""
        if not self.peer_value or not self.value:
            return None
        better = self.value / self.peer_value
        return better if self.unit.endswith(_HIGHER_IS_BETTER) else 1 / better

    def to_json(self) -> dict[str, Any]:
        """The object in the JSON file."""
        found: dict[str, Any] = {"name": self.name, "value": self.value, "unit": self.unit}
        if self.peer is not None:
            found |= {"peer": self.peer, "peer_value": self.peer_value, "ratio": self.ratio}
        return found


def interleave(
    contenders: Mapping[str, Callable[[int], object]],
    *,
    rounds: int = ROUNDS,
    warm_up: int = WARM_UP,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Time contenders in turn.

    Args:
      contenders: Name -> what to time; it is called with the number of the round, by which it chooses its
        input.
      rounds: Timed rounds.
      warm_up: Untimed rounds first.
      clock: Returns the time in seconds, or with `time.process_time` that of all threads on processors.

    Returns:
      Name -> median seconds of a call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        for name, run in contenders.items():
            start = clock()
            run(number)
            if number >= warm_up:
                seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def machine() -> dict[str, Any]:
    """Time, machine and command: the first object of a JSON file."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *(_bare(word) for word in sys.argv[1:])]),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark takes."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--json", type=Path, help="also write the results to this file")
    options.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds (default: %(default)s)")
    options.add_argument("--smoke", action="store_true", help="small sizes, to check that it runs")
    return options


def report(title: str, results: Sequence[Result], path: Path | None, **facts: Any) -> None:
    """Print the results as a table; write them as JSON if ``path`` is given.

    Args:
      title: The title of the table.
      results: The figures.
      path: A JSON file.
      facts: More of the machine's description, such as versions of peers.
    """
    rows = [("", "value", "unit", "peer", "its value", "times better")]
    for result in results:
        absent = result.peer is not None and result.peer_value is None
        row = (
            result.name,
            _short(result.value),
            result.unit,
            result.peer or "",
            "absent" if absent else _short(result.peer_value),
            f"{result.ratio:.2f}" if result.ratio else "",
        )
        rows.append(row)
    _print(title, rows)
    if path:
        write(path, results, **facts)


def _print(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a table under its headings, plainly without rich, which a machine with a GPU may lack."""
    if importlib.util.find_spec("rich") is None:
        print(title, *("\t".join(row) for row in rows), sep="\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in rows[0]:
        left = heading in ("", "unit", "peer")
        table.add_column(heading, justify="left" if left else "right", no_wrap=not heading)
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def write(path: Path, results: Sequence[Result], **facts: Any) -> None:
    """Write results as JSON; long benchmarks do so after each result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    objects = [{**machine(), **facts}, *(result.to_json() for result in results)]
    path.write_text(json.dumps(objects, indent=1) + "\n")


def _bare(word: str) -> str:
    """Return a word of the command without the folders of this machine."""
    return Path(word).name if Path(word).is_absolute() else word


def _short(value: float | None) -> str:
    if value is None:
        return ""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.2f}{letter}"
    return f"{value:.3g}"
