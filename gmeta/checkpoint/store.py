"""A folder with the sharded checkpoints of one training run, named by step; the last ones are kept."""

from __future__ import annotations

import os
import re
import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gmeta.checkpoint import lock as folders
from gmeta.checkpoint import lock as locks
from gmeta.checkpoint.chain import Link, read_links
from gmeta.checkpoint.manifest import FILE_NAME, Manifest
from gmeta.checkpoint.sharded import CheckpointInfo, Tables, load, save
from gmeta.core.collectives.elastic import after_save
from gmeta.core.collectives.rank_group import Gather, Ranks
from gmeta.core.errors import ConfigError, DataError

_NAME = re.compile(r"step-(\d{12})")


class CheckpointStore:
    """Store that saves full checkpoints and increments on them, keeps the last ones, and finds the latest.

    A full checkpoint is followed by increments. Once there are ``max_increments`` of them, or together they
    are half as large as the full one, the next checkpoint is full again. New full saves keep chains short;
    files are never rewritten.

    Args:
      root: The folder; only this run may use it. One job at a time saves in it, from `claim` or its first
        save until the job ends or the store object is deleted (`gmeta.checkpoint.lock`).
      keep: How many checkpoints to keep. Checkpoints that a kept one continues are kept too.
      max_increments: How many increments follow a full checkpoint; 0: all are full.
      journal: About how many removed keys each table records between two saves; if more are removed, the next
        save is full.
      rank: This rank; by default that of `gmeta.core.collectives.world`.
      world_size: How many ranks there are; by default that of `gmeta.core.collectives.world`.
      gather: As in `gmeta.checkpoint.sharded.save`.

    With several ranks, all of them call `save`, `describe`, `load` and `agree_on_latest` together. An error
    on one rank is raised by all ranks, with the number of that rank.

    Raises:
      ConfigError: ``keep`` is below 1, or ``max_increments`` or ``journal`` below 0.

    Example:
      ::

        store = CheckpointStore("runs/a/checkpoints", keep=3)
        if store.latest() is not None:
            store.load({"item": table})
        for step in range(...):
            ...
            store.save({"item": table}, step)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int = 3,
        max_increments: int = 10,
        journal: int = 1_000_000,
        rank: int | None = None,
        world_size: int | None = None,
        gather: Gather | None = None,
    ) -> None:
        if keep < 1 or max_increments < 0 or journal < 0:
            raise ConfigError(
                "keep must be at least 1, max_increments and journal at least 0, got "
                f"keep={keep}, max_increments={max_increments}, journal={journal}"
            )
        self.root = Path(root).resolve()
        self._keep, self._max_increments = keep, max_increments
        self._journal = journal if max_increments else 0
        self._place = (rank, world_size, gather)
        self._lock = locks.FolderLock(self.root / locks.FILE_NAME, f"{self.root} is written")
        weakref.finalize(self, self._lock.release)  # also when the process ends

    @property
    def ranks(self) -> Ranks:
        """Ranks that save and load here together."""
        return Ranks.of(*self._place)

    def checkpoints(self) -> list[Path]:
        """List the whole checkpoints, the oldest first."""
        found = self.root.glob("step-*/" + FILE_NAME) if self.root.exists() else ()
        return sorted(path.parent for path in found if _NAME.fullmatch(path.parent.name))

    def latest(self) -> Path | None:
        """Find the latest whole checkpoint; None if there is none."""
        return next(reversed(self.checkpoints()), None)

    def agree_on_latest(self) -> Path | None:
        """Find the latest whole checkpoint as rank 0 sees the folder."""
        name = self.ranks.from_first(lambda: _name_of(self.latest()))
        return None if name is None else self.root / name

    def claim(self) -> None:
        """Claim the folder for this job's saves; all ranks call it together. `save` and `describe` claim too.

        Raises:
          ConfigError: Another job saves here; the message names its host and process.
          GmetaError: The folder can't be written.
        """
        self.ranks.from_first(self._lock.take)

    def save(
        self,
        tables: Tables,
        step: int,
        *,
        dense: Callable[[Path], None] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> CheckpointInfo:
        """Save as ``step-<step>``, then remove checkpoints that are no longer kept.

        Args:
          tables: Name -> table.
          step: Names the checkpoint; must be above the latest one's.
          dense: As in `gmeta.checkpoint.sharded.save`.
          metadata: As in `gmeta.checkpoint.sharded.save`.

        Raises:
          ConfigError: The step isn't above the latest one's, or another job saves here.
          GmetaError: As in `gmeta.checkpoint.sharded.save`.
          SystemExit: In an elastic job, on all ranks, if the job is to continue with another number of ranks;
            it restarts from this checkpoint (`gmeta.core.collectives.elastic`).
        """
        ranks = self.ranks
        base = ranks.from_first(lambda: self._next_base(step))
        info = save(
            self.root / f"step-{step:012d}",
            tables,
            rank=ranks.rank,
            world_size=ranks.size,
            base=None if base is None else self.root / base,
            journal=self._journal,
            dense=dense,
            metadata=metadata,
            gather=ranks.gather,
        )
        with ranks.together():
            if ranks.rank == 0:
                self._lock.take()  # while suspended, a job may have lost the folder and its files
                self._retire()
        after_save(ranks.from_first)
        return info

    def delete(self) -> None:
        """Delete the folder with all its checkpoints, and release it; all ranks call this together.

        Raises:
          ConfigError: Another job saves here.
        """

        def remove() -> None:
            self._lock.take()
            shutil.rmtree(self.root, ignore_errors=True)
            self._lock.release()

        self.ranks.from_first(remove)

    def describe(self, metadata: Mapping[str, Any]) -> None:
        """Replace the latest checkpoint's metadata, and nothing else. Rank 0 does so.

        Raises:
          ConfigError: Another job saves here.
          DataError: There is no checkpoint, or it is damaged.
        """
        ranks = self.ranks
        with ranks.together():
            if ranks.rank == 0:
                self._lock.take()
                latest = self._existing(self.latest())
                replace(Manifest.load(latest), metadata=metadata).save(latest)

    def load(
        self, tables: Tables, checkpoint: Path | None = None, *, partial: bool = False
    ) -> CheckpointInfo:
        """Load the latest checkpoint, or the given one. See `gmeta.checkpoint.sharded.load`.

        Raises:
          DataError: There is no checkpoint, or it is damaged.
        """
        chosen = self._existing(checkpoint or self.agree_on_latest())
        ranks = self.ranks
        return load(
            chosen,
            tables,
            rank=ranks.rank,
            world_size=ranks.size,
            journal=self._journal,
            gather=ranks.gather,
            partial=partial,
        )

    def _existing(self, checkpoint: Path | None) -> Path:
        if checkpoint is None:
            raise DataError("no checkpoint in this folder", path=self.root)
        return checkpoint

    def _next_base(self, step: int) -> str | None:
        """Return the name of the checkpoint that the checkpoint of ``step`` continues."""
        self._lock.take()
        latest = self.latest()
        if latest is not None and step <= step_of(latest):
            raise ConfigError(
                f"{self.root} has {latest.name}: a checkpoint of step {step} would come before it; load it "
                "first, or save in another folder"
            )
        return _name_of(self._base(latest))

    def _base(self, latest: Path | None) -> Path | None:
        """Return the checkpoint to continue; None if a full one is due."""
        if latest is None or not self._max_increments:
            return None
        try:
            links = read_links(latest)
        except DataError:
            return None
        increments = sum(link.manifest.bytes for link in links[1:])
        long = len(links) > self._max_increments or 2 * increments >= links[0].manifest.bytes
        return None if long and len(links) > 1 else latest

    def _retire(self) -> None:
        folders.sweep(self.root)
        every = self.checkpoints()
        needed = {link.folder for kept in every[-self._keep :] for link in _links(kept)}
        # Remove the newest first, so that the checkpoints left by a crash can still be loaded.
        for path in reversed(every):
            if path not in needed:
                folders.discard(path)


def step_of(checkpoint: Path) -> int:
    """Read the step from a checkpoint's name.

    Raises:
      ConfigError: The checkpoint isn't named by a step.
    """
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ConfigError(f"{checkpoint} isn't named step-<12 digits>")
    return int(match[1])


def _name_of(checkpoint: Path | None) -> str | None:
    return None if checkpoint is None else checkpoint.name


def _links(checkpoint: Path) -> list[Link]:
    try:
        return read_links(checkpoint)
    except DataError:  # damaged from outside: which checkpoints it needs is unknown
        return []
