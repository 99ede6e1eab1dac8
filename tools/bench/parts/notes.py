"""The figures of a benchmark that takes long: printed and written as they come."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path
from typing import Any

from harness import Result, write


class Notes:
    """The figures so far. A repeated figure replaces the earlier one."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.results: dict[str, Result] = {}
        self.facts = facts
        self._path = path
        self._start = time.perf_counter()

    def __call__(self, *results: Result) -> None:
        """Take figures, print the first of them, and write the file."""
        self.results |= {result.name: result for result in results}
        first = results[0]
        beside = f"; {first.peer}: {first.peer_value:.4g}" if first.peer_value is not None else ""
        seconds = time.perf_counter() - self._start
        print(f"  {seconds:5.0f} s  {first.name}: {first.value:.4g} {first.unit}{beside}", flush=True)
        if self._path:
            write(self._path, list(self.results.values()), **self.facts)


def gpu() -> str | None:
    """Return the GPU's name."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return None
