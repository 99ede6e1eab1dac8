"""Writing of shards by workers that may be killed, repeated, or run twice at once.

Each attempt writes into a folder of its own. Once its shard and index are whole and on the disk, it renames
them to their final names. A later attempt replaces equal bytes by equal bytes, so it doesn't matter which
attempt a scheduler accepts. Killed attempts leave only their folders, which the end of the job removes.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gmeta.core.data_manifest import Shard
from gmeta.core.errors import DataError
from gmeta.core.files import write_atomically
from gmeta.core.group_index import GroupIndex, index_path
from gmeta.core.schema import Schema
from gmeta.preprocess.columns import Columns, join_rows, part, row_count, single
from gmeta.preprocess.config import PlanConfig
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.shards.data_set import shard_name, write_shard

ATTEMPTS = "_attempts"
"""The folder of the attempts' folders, in the folder that they write to."""


def place_name(place: int, config: PlanConfig) -> str:
    """Return the name of the shard at ``split * shards + shard``."""
    return shard_name(plan.splits(config)[place // config.shards], place % config.shards, config.shards)


def write_attempt(
    folder: Path, place: int, schema: Schema, config: PlanConfig, parts: Iterable[Columns], attempt: str
) -> Shard:
    """Write a shard and its index, safely beside other attempts at the same shard.

    Args:
      folder: The folder of all shards, the same for every worker.
      place: ``split * shards + shard``.
      schema: The columns.
      config: The settings.
      parts: The shard's rows in order, cut into parts anywhere.
      attempt: A name of the attempt for people who look into the folder; it needn't be unique.

    Returns:
      The shard's entry in the manifest.

    Raises:
      DataError: A batch is too large for a record.
      OSError: The file can't be written.
    """
    with own_folder(folder, attempt) as own:
        path = own / place_name(place, config)
        shard = write_shard(path, schema, config.layout, whole_batches(parts, schema), config.codec)
        # The index goes last: `collect` treats a shard as written once its index exists.
        path.replace(folder / path.name)
        index_path(path).replace(index_path(folder / path.name))
    return shard


def write_note(path: Path, text: str, attempt: str) -> None:
    """Write a small file, safely beside other attempts that write the same content."""
    with own_folder(path.parent, attempt) as own:
        write_atomically(own / path.name, text).replace(path)


@contextmanager
def own_folder(folder: Path, attempt: str) -> Iterator[Path]:
    """Make a folder for an attempt to write in, below the job's, and remove it at the end.

    Raises:
      OSError: The job's folder isn't there any more: the job has ended.
    """
    own = folder / ATTEMPTS / f"{attempt}-{uuid.uuid4().hex}"
    own.parent.mkdir(exist_ok=True)
    own.mkdir()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def whole_batches(parts: Iterable[Columns], schema: Schema) -> Iterator[Columns]:
    """Yield the rows of ``parts``, cut only where a batch ends."""
    held: list[Columns] = []
    for rows in parts:
        if not row_count(rows):
            continue
        rows = {column.name: rows[column.name] for column in schema}
        task, batch = single(rows, schema.task), single(rows, schema.batch)
        if held and (single(held[0], schema.task)[0], single(held[0], schema.batch)[0]) != (
            task[0],
            batch[0],
        ):
            yield join_rows(held)
            held = []
        changes = np.flatnonzero((task[1:] != task[:-1]) | (batch[1:] != batch[:-1]))
        cut = int(changes[-1]) + 1 if len(changes) else 0
        if cut:
            yield join_rows([*held, part(rows, 0, cut)])
            held = []
        held.append(part(rows, cut, row_count(rows)))
    if held:
        yield join_rows(held)


def collect(
    folder: Path, schema: Schema, config: PlanConfig, expected: Mapping[str, tuple[int, int, int]]
) -> dict[str, list[Shard]]:
    """Return all shards of a job whose workers have ended, and write the shards that got no rows.

    Args:
      folder: The folder of the shards.
      schema: The columns.
      config: The settings.
      expected: Split -> (tasks, groups, rows) that it must hold.

    Raises:
      DataError: A shard is missing, a shard doesn't match its index, or rows are missing or duplicated.
    """
    shutil.rmtree(folder / ATTEMPTS, ignore_errors=True)
    found: dict[str, list[Shard]] = {}
    for number, split in enumerate(plan.splits(config)):
        places = range(number * config.shards, (number + 1) * config.shards)
        written = {place: _shard(folder / place_name(place, config), config) for place in places}
        missing = [place for place, shard in written.items() if shard is None]
        there = [shard for shard in written.values() if shard is not None]
        rows, groups = sum(shard.rows for shard in there), sum(shard.groups for shard in there)
        if (groups, rows) != expected[split][1:]:
            names = ", ".join(place_name(place, config) for place in missing)
            raise DataError(
                f"{split} has {rows} rows in {groups} groups, {expected[split][2]} in {expected[split][1]} "
                "were cut" + (f"; these shards aren't there: {names}" if names else ""),
                path=folder,
                advice="run the job that writes the shards again",
            )
        empty = {place: write_attempt(folder, place, schema, config, (), "empty") for place in missing}
        found[split] = [written[place] or empty[place] for place in places]
    return found


def _shard(path: Path, config: PlanConfig) -> Shard | None:
    """Return the shard that was written at ``path``, or None."""
    if not index_path(path).exists():
        return None
    index = GroupIndex.load(path)
    if index.layout != config.layout:
        raise DataError(f"layout {index.layout}, {config.layout} is requested", path=path)
    return Shard(path.name, len(index.groups), index.rows, index.shard_bytes, index.checksum)
