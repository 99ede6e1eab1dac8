"""Checks every byte of a generation of a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import DataError
from gmeta.core.history_manifest import HistoryManifest, user_shards
from gmeta.preprocess.history.generation import Generation, find_left, find_strange, settle
from gmeta.preprocess.history.shard_reader import Index, read_stripe
from gmeta.preprocess.history.shard_writer import owners
from gmeta.preprocess.tables.table_files import sha256


@dataclass(frozen=True)
class Verification:
    """What a check found.

    Attributes:
      generation: The generation that was checked.
      stripes: Stripes that were read.
      events: Events in them, each counted once for each group.
      faults: What is wrong, a line each, with file, offset and user.
      left: What is in the store and doesn't belong there, a line each: generations whose deletion was begun
        and that this process can't remove, and folders that aren't generations. They may hold events of
        deleted users.
      uncommitted: What killed processes have left of generations, a line each; the next append removes it.
    """

    generation: int
    stripes: int
    events: int
    faults: tuple[str, ...]
    left: tuple[str, ...]
    uncommitted: tuple[str, ...]


def verify_history(store: Path, generation: int | None = None) -> Verification:
    """Read all that a generation holds, whichever generation wrote it, and compare it with its checksums.

    Checked are the manifest's digest; the SHA-256 of each index and of each file of stripes; of each stripe
    the checksums of its directory and of every column, the number of its events, and that their times and
    births are those of the index; and that each user is in its own shard, with as many events in each
    group. A deletion that a killed process has begun is finished first.

    Args:
      store: The store's folder.
      generation: Which one; None: the newest.

    Raises:
      DataError: There is no such store or generation, or its manifest is damaged.
    """
    left = [*settle(store), *find_strange(store)]
    opened = Generation(store, generation)
    stripes, events, faults = 0, 0, list[str]()
    for shard in range(len(opened.manifest.shards)):
        try:
            with closing(opened.open(shard)) as reader:
                index = reader.index()
        except DataError as error:
            faults.append(str(error))
            continue
        stripes += len(index.places)
        events += int(index.places["events"].sum())
        faults += _check_index(opened, shard, index)
        wrong = list(_check_stripes(opened, shard, index))
        faults += wrong or _check_files(opened, shard)
    return Verification(
        opened.manifest.generation, stripes, events, tuple(faults), tuple(left), tuple(find_left(store))
    )


def _check_files(opened: Generation, shard: int) -> Iterator[str]:
    """Compare files of stripes that are sound by themselves with the manifests of their generations."""
    for number, path in opened.files(shard).items():
        try:
            manifest = HistoryManifest.load(opened.store, number)
            found = sha256(path)
        except DataError as error:
            yield str(error)
            continue
        if found != manifest.shards[shard].sha256:
            yield f"{path}: its SHA-256 isn't the one in the manifest of generation {number}"


def _check_index(opened: Generation, shard: int, index: Index) -> Iterator[str]:
    where = user_shards(index.users, len(opened.manifest.shards))
    for user in index.users[where != shard].tolist():
        yield f"shard {shard}: user {user} belongs to another shard"
    owner = np.searchsorted(index.users, owners(index))
    counts = np.zeros((len(opened.manifest.groups), len(index.users)), np.int64)
    np.add.at(counts, (index.places["group"], owner), index.places["events"])
    for user in index.users[(counts != counts[:1]).any(axis=0)].tolist():
        yield f"shard {shard}: user {user} has more events in one group than in another"


def _check_stripes(opened: Generation, shard: int, index: Index) -> Iterator[str]:
    widths = [2 + len(columns) for columns in opened.manifest.groups.values()]
    files, contents = opened.files(shard), dict[int, NDArray[np.uint8]]()
    for place, user in zip(index.places, owners(index).tolist(), strict=True):
        number, offset = int(place["file"]), int(place["offset"])
        path = files.get(number)
        where = f"{path or f'generation {number}'} at byte {offset}: user {user}"
        if path is None or not path.exists():
            yield f"{where}: the file isn't there"
            continue
        if number not in contents:
            contents[number] = np.memmap(path, np.uint8) if path.stat().st_size else np.empty(0, np.uint8)
        try:
            data = contents[number][offset : offset + int(place["bytes"])].tobytes()
            columns = read_stripe(data, where=where)
        except DataError as error:
            yield str(error)
            continue
        if len(columns) != widths[int(place["group"])] or len(columns[0]) != place["events"]:
            yield f"{where}: its columns or events differ from those of the index"
            continue
        times, births = columns[:2]
        found = (times.min(), times.max(), births.min(), births.max())
        if found != tuple(place[name] for name in ("first", "last", "born_first", "born_last")):
            yield f"{where}: the times or births of its events differ from those of the index"
