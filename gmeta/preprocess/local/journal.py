"""The journal of a preparation, from which a killed preparation resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gmeta.core.data.group_index import GroupIndex
from gmeta.core.data.manifest import Shard
from gmeta.core.errors import DataError, GmetaError
from gmeta.core.json_values import parse_json
from gmeta.core.staging import clear

FILE_NAME = "journal.jsonl"


class Journal:
    """Lines of JSON in the staging folder; each line is on the disk before the work goes on.

    The first line holds the plan: settings, and stamps of the input. A ``sorted`` line follows once the runs
    of sorted batches are whole, and then a ``shard`` line for each written shard. An incomplete last line
    counts as not written, and files that the journal doesn't mention are removed.

    Args:
      folder: The staging folder.
      plan: The settings and the input's stamps, as JSON values.

    Attributes:
      runs: The number of runs, or None while they aren't whole.
      shards: Name -> shard, for the shards that are written.

    Raises:
      GmetaError: The folder's journal has another plan.
    """

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self._folder, self._path = folder, folder / FILE_NAME
        self.runs: int | None = None
        self.shards: dict[str, Shard] = {}
        entries = self._read()
        plan = json.loads(json.dumps(plan))
        if entries and entries[0] != {"plan": plan}:
            there = entries[0].get("plan", {})
            different = sorted(key for key in {*plan, *there} if plan.get(key) != there.get(key))
            raise GmetaError(
                f"{folder} is left from a run with other settings or input ({', '.join(different)}): "
                "run without --resume to begin anew"
            )
        for entry in entries[1:]:
            if "sorted" in entry:
                self.runs = entry["sorted"]
            elif "shard" in entry:
                self._believe(Shard(**entry["shard"]))
        if self.runs is None:
            self.shards.clear()
            clear(folder)
            self._add({"plan": plan})
        for path in folder.glob("*.tmp"):  # files that were being written
            path.unlink()

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        entries = []
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            try:
                entries.append(parse_json(line))
            except ValueError:
                break
        # Remove an incomplete last line; otherwise the next entry would be appended to it.
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return entries

    def _believe(self, shard: Shard) -> None:
        """Count a shard as written if its file matches the journal's entry."""
        path = self._folder / shard.name
        try:
            if GroupIndex.load(path).checksum == shard.index and path.stat().st_size == shard.bytes:
                self.shards[shard.name] = shard
        except (DataError, OSError):
            path.unlink(missing_ok=True)

    def add_sorted(self, runs: int) -> None:
        """Record that the runs are whole."""
        self.runs = runs
        self._add({"sorted": runs})

    def add_shard(self, shard: Shard) -> None:
        """Record that a shard is written."""
        self.shards[shard.name] = shard
        self._add({"shard": asdict(shard)})

    def _add(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
