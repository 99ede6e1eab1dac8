"""Writes a shard of a generation: events as stripes, and the index of all that the shard has."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data.history_manifest import HistoryShard, shard_files
from gmeta.preprocess.history.files.shard_reader import encode_index
from gmeta.preprocess.history.files.stripe import StripeEncoder
from gmeta.preprocess.history.files.stripe_layout import Deletions, build_index, cut, describe

Ints = NDArray[np.int64]


class Kept(NamedTuple):
    """What a shard has besides the stripes that are written.

    Attributes:
      owner: (S,) int64: the user of each stripe.
      places: (S,) `PLACE`: the stripes, in files of earlier generations.
      deletions: The users whose events were deleted.
    """

    owner: Ints
    places: NDArray[np.void]
    deletions: Deletions


class Written(NamedTuple):
    """What has been written.

    Attributes:
      shard: The manifest's entry.
      reads: The generations whose files the index names.
    """

    shard: HistoryShard
    reads: set[int]


def write_stripes(
    folder: Path,
    number: int,
    generation: int,
    tables: Iterable[Sequence[Ints]],
    stripe_events: int,
    kept: Kept,
) -> Written:
    """Write the stripes and the index of a shard.

    The stripes of a group lie side by side, in the order of users.

    Args:
      folder: The generation's folder.
      number: The shard's number.
      generation: The generation's number.
      tables: For each group its columns: user, time, birth and the group's own, ordered by the first three.
      stripe_events: Most events of a stripe.
      kept: What else the shard has.

    Raises:
      OSError: The disk is full.
    """
    events_path, index_path = shard_files(folder, number)
    owner, places, at = [kept.owner], [kept.places], 0
    with closing(StripeEncoder()) as encoder, _NewFile(events_path) as file:
        for group, columns in enumerate(tables):
            ends = cut(columns[0], stripe_events)
            data, byte_ends = encoder.encode(columns[1:], ends)
            file.write(data)
            places.append(
                describe(columns[1], columns[2], ends, byte_ends, group=group, file=generation, offset=at)
            )
            owner.append(columns[0][ends - 1])
            at += len(data)
    index = build_index(np.concatenate(owner), np.concatenate(places), kept.deletions)
    with _NewFile(index_path) as index_file:
        index_file.write(encode_index(index))
    first_group = index.places["group"] == 0
    shard = HistoryShard(
        users=int((np.diff(index.ends, prepend=0) > 0).sum()),
        deleted=len(kept.deletions.users),
        stripes=len(index.places),
        events=int(index.places["events"][first_group].sum()),
        bytes=file.bytes,
        sha256=file.digest,
        index_bytes=index_file.bytes,
        index_sha256=index_file.digest,
    )
    return Written(shard, set(np.unique(index.places["file"]).tolist()))


class _NewFile:
    """A file that is on the disk when the block ends.

    Attributes:
      bytes: Its size.
      digest: SHA-256 of its content.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.bytes, self._hash = path, 0, hashlib.sha256()

    def __enter__(self) -> _NewFile:
        self._file = self._path.open("xb")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()
