"""What of a preparation is done, so that a killed one goes on where it was."""

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
from gmeta.core.staging import clear

FILE_NAME = "journal.jsonl"


class Journal:
    """Lines of JSON in the staging folder; each is on the disk before the work goes on.

    The first says what is prepared: settings, and stamps of the input. Then come ``sorted``, once the runs of
    sorted batches are whole, and a ``shard`` for each that is written. A last line that was cut counts as not
    written, and what the journal doesn't know of is removed.

    Args:
      folder: The staging folder.
      plan: What is prepared, as JSON values.

    Attributes:
      runs: How many runs there are, or None while they aren't whole.
      shards: Name -> shard, of those that are written.

    Raises:
      GmetaError: The folder's journal is of something else.
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
        for path in folder.glob("*.tmp"):  # what was being written
            path.unlink()

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        entries = []
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
        # What was cut goes, or the next entry would stand behind it.
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return entries

    def _believe(self, shard: Shard) -> None:
        """Count a shard as written if it is what the journal says."""
        path = self._folder / shard.name
        try:
            if GroupIndex.load(path).checksum == shard.index and path.stat().st_size == shard.bytes:
                self.shards[shard.name] = shard
        except (DataError, OSError):
            path.unlink(missing_ok=True)

    def add_sorted(self, runs: int) -> None:
        """The runs are whole."""
        self.runs = runs
        self._add({"sorted": runs})

    def add_shard(self, shard: Shard) -> None:
        """A shard is written."""
        self.shards[shard.name] = shard
        self._add({"shard": asdict(shard)})

    def _add(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
