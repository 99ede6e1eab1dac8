"""The manifest of a generation of a history store, and the layout of the store's files.

::

    store/
      CURRENT                           the newest generation: its number and the digest of its manifest
      NEXT                              the same of a generation that isn't committed yet
      DROPPING                          the numbers of the generations whose deletion has begun
      generations/00000012/
        shard-00003.events              stripes that this generation wrote
        shard-00003.index               the places of all stripes of the shard's users, in any generation
        manifest.json                   this

A generation appears by a rename, and its files never change. It is committed by renaming the previously
written NEXT to CURRENT. A generation newer than CURRENT that NEXT doesn't name was therefore committed
before, and CURRENT was set back: readers and writers refuse this. Older versions of gmeta wrote only the
number, and no NEXT.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import ReadablePath, write_atomically
from gmeta.core.json_values import (
    FILE_NAME,
    MOST,
    SealedManifest,
    items,
    load_manifest_file,
    mapping,
    short,
    text,
    whole,
    wholes,
)
from gmeta.core.schema import Column, DType
from gmeta.core.shares import range_of, splitmix64

BIRTH = "born"
"""The name by which readers request the generation that first held an event."""

CURRENT, NEXT, DROPPING, GENERATIONS = "CURRENT", "NEXT", "DROPPING", "generations"
FORMAT, VERSION = "gmeta-histories", 2
DROPPED_INPUTS, _INPUTS_FORMAT, _INPUTS_VERSION = "dropped-inputs.json", "gmeta-history-inputs", 1


@dataclass(frozen=True)
class HistoryShard:
    """The users of a range of hashes.

    Attributes:
      users: Number of users with events.
      deleted: Number of users whose events were deleted (`gmeta history scrub`), including those who
        returned.
      stripes: Number of their stripes, in all groups and generations.
      events: Number of their events.
      bytes: The size of the stripes that this generation wrote.
      sha256: The digest of these stripes.
      index_bytes: The size of the index.
      index_sha256: The digest of the index.
    """

    users: int
    deleted: int
    stripes: int
    events: int
    bytes: int
    sha256: str
    index_bytes: int
    index_sha256: str

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HistoryShard:
        """Read a shard from what `dataclasses.asdict` returns; raise ValueError, KeyError or TypeError."""
        shard = cls(**mapping(value, "a shard"))
        for name in ("users", "deleted", "stripes", "events", "bytes", "index_bytes"):
            whole(getattr(shard, name), name)
        text(shard.sha256, "sha256")
        text(shard.index_sha256, "index_sha256")
        return shard


class StripeColumn(NamedTuple):
    """A column of a group's stripes.

    Attributes:
      name: Its name.
      number: Its number in the stripes.
      dtype: Its type.
    """

    name: str
    number: int
    dtype: DType


@dataclass(frozen=True)
class HistoryManifest(SealedManifest):
    """The contents of a generation.

    Attributes:
      generation: Its number, counted from 1.
      groups: Group -> its columns. Each group's stripes begin with two more: the time and the birth.
      shards: The shards; a user is in shard `user_shards`.
      watermark: A time; all earlier events had arrived when this generation was written, as far as known.
      start: The time before which compaction removed events; None: no compaction.
      inputs: The input files of this generation -> their SHA-256.
      reads: The generations whose stripes the indexes reference, ascending.
      spec: How events are read from tables, as JSON values (`gmeta.preprocess.HistorySpec`).
    """

    generation: int
    groups: Mapping[str, tuple[Column, ...]]
    shards: tuple[HistoryShard, ...]
    watermark: int
    start: int | None
    inputs: Mapping[str, str]
    reads: tuple[int, ...]
    spec: Mapping[str, Any]

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "watermark": self.watermark,
            "start": self.start,
            "inputs": dict(self.inputs),
            "reads": list(self.reads),
            "groups": {
                name: [{"name": column.name, "dtype": column.dtype} for column in columns]
                for name, columns in self.groups.items()
            },
            "spec": dict(self.spec),
            "shards": [asdict(shard) for shard in self.shards],
        }

    def find(self, columns: Sequence[str]) -> tuple[int, list[StripeColumn]]:
        """Return the number of the group that has all of these columns, and the columns.

        The time and ``"born"`` are in every group.

        Raises:
          ConfigError: A column is missing, or they belong to several groups.
        """
        both = [self.spec["time"], BIRTH]
        for number, own in enumerate(self.groups.values()):
            every = [StripeColumn(name, at, "int64") for at, name in enumerate(both)]
            every += [StripeColumn(column.name, at, column.dtype) for at, column in enumerate(own, 2)]
            by_name = {column.name: column for column in every}
            if set(columns) <= by_name.keys():
                return number, [by_name[name] for name in columns]
        known = {*both, *(column.name for own in self.groups.values() for column in own)}
        unknown = [name for name in columns if name not in known]
        said = "; ".join(f"{name} has {', '.join(c.name for c in own)}" for name, own in self.groups.items())
        if unknown:
            raise ConfigError(
                f"no column {unknown[0]!r} in the histories: all have {', '.join(both)}; {said}"
            )
        raise ConfigError(
            f"columns {', '.join(columns)} are of several groups: read each group alone; {said}"
        )

    @classmethod
    def load(cls, store: ReadablePath, generation: int) -> HistoryManifest:
        """Read the manifest of a generation.

        Raises:
          DataError: There is no such generation, or its manifest was edited or is of another format.
        """
        return cls.load_folder(generation_folder(store, generation), generation)

    @classmethod
    def load_folder(cls, folder: Any, generation: int) -> HistoryManifest:
        """Read the manifest in a generation's folder, which may still have another name; raises as `load`."""
        path = folder / FILE_NAME
        advice = "restore the file, or take another generation"
        value = load_manifest_file(
            path, FORMAT, VERSION, advice=advice, older="read the store with the gmeta that wrote it"
        )
        try:
            groups = {
                name: tuple(Column(**column) for column in items(columns, name))
                for name, columns in mapping(value["groups"], "groups").items()
            }
            manifest = cls(
                whole(value["generation"], "generation", 1),
                groups,
                tuple(HistoryShard.from_json(shard) for shard in items(value["shards"], "shards")),
                whole(value["watermark"], "watermark", -MOST - 1),
                None if value["start"] is None else whole(value["start"], "start", -MOST - 1),
                {name: text(digest, name) for name, digest in mapping(value["inputs"], "inputs").items()},
                tuple(wholes(value["reads"], "reads")),
                mapping(value["spec"], "spec"),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DataError(" ".join(str(error).split()), path=path, advice=advice) from error
        if manifest.digest != value.get("digest") or manifest.generation != generation:
            raise DataError("its digest doesn't match its content: it was edited", path=path, advice=advice)
        return manifest


class Pointer(NamedTuple):
    """The content of CURRENT and NEXT.

    Attributes:
      generation: The number of a generation.
      digest: The digest of its manifest; None: an older version of gmeta wrote the pointer.
    """

    generation: int
    digest: str | None

    @classmethod
    def load(cls, path: ReadablePath) -> Pointer | None:
        """Read a pointer; return None if the file doesn't exist.

        Raises:
          DataError: The file contains something else.
        """
        try:
            content = path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"can't read it: {error.strerror}", path=path) from error
        found = _POINTER.fullmatch(content)
        if found is None:
            raise DataError(
                f"it holds {short(content)} in place of a generation's number and digest",
                path=path,
                advice="restore the file, or write the number of the newest generation into it",
            )
        return cls(int(found[1]), found[2])

    def __str__(self) -> str:
        return f"{self.generation} {self.digest}\n"


_POINTER = re.compile(r"([1-9][0-9]{0,8})(?: ([0-9a-f]{64}))?\s*", re.ASCII)
_NAME = re.compile(r"[0-9]{8,9}", re.ASCII)


def current_generation(store: ReadablePath) -> int:
    """Return the number of the newest generation; 0 if there is none yet.

    Raises:
      DataError: CURRENT contains something else, is missing although generations exist, names an older
        generation than the newest, or doesn't match the generation's manifest.
    """
    while True:
        current, pending = Pointer.load(store / CURRENT), Pointer.load(store / NEXT)
        number = current.generation if current else 0
        later = _later(store, number)
        is_pending = (
            pending is not None
            and later == [pending.generation] == [number + 1]
            and _digest(store, number + 1) in (None, pending.digest)  # None: its removal has started
        )
        if not later or is_pending:
            break
        if Pointer.load(store / CURRENT) == current:  # otherwise a generation was just committed
            said = f"names generation {number}" if current else "is missing"
            raise DataError(
                f"it {said}, and {_names(later)} there, which a store doesn't lose",
                path=store / CURRENT,
                advice=f"restore the file, or write {later[-1]} into it; to go back instead, move the "
                "folders of later generations out of the store",
            )
    if current and current.digest and _digest(store, number) not in (None, current.digest):
        raise DataError(
            f"it doesn't match the manifest of generation {number}",
            path=store / CURRENT,
            advice="restore both from the same copy, or write the number of the newest generation into it",
        )
    return number


def newest_generation(store: ReadablePath) -> int:
    """Return the number of the newest generation.

    Raises:
      DataError: There is no store here; or as for `current_generation`.
    """
    found = current_generation(store)
    if not found:
        raise DataError(
            "there is no store of histories here", path=store, advice="make one with `gmeta history append`"
        )
    return found


def dropping(store: ReadablePath) -> frozenset[int]:
    """Return the numbers of the generations whose deletion has begun.

    Raises:
      DataError: DROPPING contains something else.
    """
    path = store / DROPPING
    try:
        content = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise DataError(f"can't read it: {error.strerror}", path=path) from error
    numbers, _, digest = content.strip().rpartition(" ")
    if digest != hashlib.sha256(numbers.encode()).hexdigest():
        raise DataError(
            f"it holds {short(content)} in place of the numbers of generations and their digest",
            path=path,
            advice="remove the file, and drop the generations again",
        )
    return frozenset(map(int, numbers.split()))


def begin_to_drop(store: Path, numbers: Collection[int]) -> None:
    """Record that the deletion of generations has begun; from now on, they are ignored."""
    named = " ".join(map(str, sorted(numbers)))
    write_atomically(store / DROPPING, f"{named} {hashlib.sha256(named.encode()).hexdigest()}\n")


def folder_numbers(store: Path) -> list[int]:
    """Return the numbers of the folders of generations, committed or not, ascending."""
    folder = store / GENERATIONS
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if is_generation_name(name))


def is_generation_name(name: str) -> bool:
    """Return whether a name in the folder of generations belongs to a generation."""
    return _NAME.fullmatch(name) is not None and name == f"{int(name):08d}" and int(name) > 0


def _later(store: ReadablePath, number: int) -> list[int]:
    """Return the complete generations after one; in a remote store, check only the next one."""
    if isinstance(store, Path):
        return [n for n in folder_numbers(store) if n > number]
    return [number + 1] if (generation_folder(store, number + 1) / FILE_NAME).exists() else []


def _digest(store: ReadablePath, number: int) -> str | None:
    """Return the digest in a manifest; None if it can't be read, for which `load` raises the error."""
    try:
        value = json.loads((generation_folder(store, number) / FILE_NAME).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    digest = value.get("digest") if isinstance(value, dict) else None
    return digest if isinstance(digest, str) else None


def _names(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"generation {numbers[0]} is"
    return f"generations {', '.join(map(str, numbers))} are"


def generation_folder(store: Any, generation: int) -> Any:
    """Return the folder of a generation."""
    return store / GENERATIONS / f"{generation:08d}"


def shard_files(folder: Any, shard: int) -> tuple[Any, Any]:
    """Return a shard's file of stripes and its index."""
    return folder / f"shard-{shard:05d}.events", folder / f"shard-{shard:05d}.index"


def read_index(store: Path, manifest: HistoryManifest, shard: int) -> bytes:
    """Read the index of a shard.

    Raises:
      DataError: It is missing, or doesn't match the manifest.
    """
    path = shard_files(generation_folder(store, manifest.generation), shard)[1]
    try:
        data: bytes = path.read_bytes()
    except OSError as error:
        raise DataError(f"can't read it: {error.strerror}", path=path) from error
    if hashlib.sha256(data).hexdigest() != manifest.shards[shard].index_sha256:
        raise DataError(
            "its SHA-256 isn't the one in the manifest",
            path=path,
            advice="restore the file, or take another generation",
        )
    return data


def user_shards(users: NDArray[np.int64], shards: int) -> NDArray[np.int64]:
    """Return the shard of each user: shards are equal ranges of the users' hashes (`splitmix64`)."""
    return range_of(splitmix64(users.astype(np.uint64)), shards)


# Files whose events a store has, although the generations that they made are gone.


@dataclass(frozen=True)
class DroppedInputs(SealedManifest):
    """The files from which dropped generations were made: their events may still be in the store.

    Attributes:
      digests: Their digests, ascending.
    """

    digests: tuple[str, ...]

    def _body(self) -> dict[str, Any]:
        return {"format": _INPUTS_FORMAT, "version": _INPUTS_VERSION, "digests": list(self.digests)}


def dropped_inputs(store: Path) -> frozenset[str]:
    """Return the digests of dropped generations' files that no other generation has.

    Raises:
      DataError: The file of digests is damaged.
    """
    path, advice = store / DROPPED_INPUTS, "restore the file: without it, files may be appended twice"
    if not path.exists():
        return frozenset()
    value = load_manifest_file(
        path, _INPUTS_FORMAT, _INPUTS_VERSION, advice=advice, older="use the gmeta that wrote it"
    )
    try:
        found = DroppedInputs(tuple(text(one, "a digest") for one in items(value["digests"], "digests")))
    except (KeyError, ValueError) as error:
        raise DataError(" ".join(str(error).split()), path=path, advice=advice) from error
    if found.digest != value.get("digest"):
        raise DataError("its digest doesn't match its content: it was edited", path=path, advice=advice)
    return frozenset(found.digests)
