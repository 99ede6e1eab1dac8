"""The index of a shard: the place of each group, so that a reader can start at any group.

``<shard>.gidx`` holds, in little-endian numbers, a header of 32 bytes, a record of 48 bytes for each group,
in the order of the shard, and 4 bytes with the CRC-32 (`zlib.crc32`) of all preceding bytes::

    header   char[4] "GIDX" | uint32 version, 1 | uint32 layout (0 example, 1 columnar) | uint32 0
             uint64 groups | uint64 bytes of the shard
    record   int64 offset | int64 first_row | int64 rows | int64 task | int64 batch_id | uint32 crc | uint32 0

``offset`` is the byte of the shard where the group's first record begins; the group extends to the next
group's offset, or to the shard's end. ``crc`` is the CRC-32C of the concatenated payloads of the group's
records. If one record contains the group, as in the columnar layout, this is the checksum that the shard
itself stores (masked) after the payload.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError

Layout = Literal["example", "columnar"]
"""How a shard's records are encoded: one ``tf.train.Example`` per row, or one record per group, by column."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)

Codec = Literal["zstd"]
"""The codec that compresses each record of the columnar layout, if there is one."""

CODECS: tuple[Codec, ...] = get_args(Codec)
SUFFIX = ".gidx"
ENTRY = np.dtype(
    {
        "names": ["offset", "first_row", "rows", "task", "batch_id", "crc"],
        "formats": ["<i8", "<i8", "<i8", "<i8", "<i8", "<u4"],
        "itemsize": 48,
    }
)
"""The dtype of a group's record in the index."""

_MAGIC, _VERSION = b"GIDX", 1
_HEADER = struct.Struct("<4sIIIQQ")
_FOOTER = struct.Struct("<I")
_ADVICE = "write the shard again"


def check_codec(codec: str | None, layout: str) -> None:
    """Refuse an unknown codec, or one that the layout doesn't support.

    Raises:
      ConfigError: The codec is refused; the message names it and the reason.
    """
    if codec is not None and codec not in CODECS:
        raise ConfigError(f"codec must be one of {', '.join(CODECS)}, or None, got {codec!r}")
    if codec is not None and layout != "columnar":
        raise ConfigError(f"codec={codec!r} compresses records of the layout columnar, not of {layout}")


def index_path(shard: str | Path) -> Path:
    """Return the path of a shard's index."""
    return Path(f"{shard}{SUFFIX}")


@dataclass(frozen=True, eq=False)
class GroupIndex:
    """The places of a shard's groups.

    Attributes:
      layout: How the shard's records are encoded.
      shard_bytes: The size of the shard.
      groups: (G,) of `ENTRY`, in the shard's order: ``offset``, ``first_row`` (rows of the shard before the
        group), ``rows``, ``task``, ``batch_id``, ``crc``.

    Example:
      >>> with RecordWriter("warm.tfrecord", schema, layout="columnar", index=True) as writer:
      ...     writer.write(columns)
      >>> index = GroupIndex.load("warm.tfrecord")
      >>> index.groups["offset"][index.groups["task"] == 7]
    """

    layout: Layout
    shard_bytes: int
    groups: NDArray[Any]

    @property
    def rows(self) -> int:
        """The number of rows in the shard."""
        return int(self.groups["rows"].sum())

    @property
    def checksum(self) -> int:
        """The CRC-32 in the last four bytes of the index file, which the manifest also contains."""
        return checksum_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of the index file."""
        entries = np.zeros(len(self.groups), ENTRY)  # its gaps are zeros
        for name in ENTRY.names or ():
            entries[name] = self.groups[name]
        layout = LAYOUTS.index(self.layout)
        body = _HEADER.pack(_MAGIC, _VERSION, layout, 0, len(entries), self.shard_bytes) + entries.tobytes()
        return body + _FOOTER.pack(zlib.crc32(body))

    @classmethod
    def load(cls, shard: str | Path, *, check_shard: bool = True, checksum: int | None = None) -> GroupIndex:
        """Read the index of a shard.

        Args:
          shard: The shard; its index is ``<shard>.gidx``.
          check_shard: Whether the shard must exist, with the size that the index states.
          checksum: The checksum of the index in the manifest; None: it isn't compared.

        Raises:
          DataError: The index is missing, is damaged, is of a newer version, contradicts itself or the shard,
            or doesn't match the manifest. The error names the file, and the offset if there is one.
        """
        path = index_path(shard)
        try:
            data = path.read_bytes()
            size = Path(shard).stat().st_size if check_shard else None
        except OSError as error:
            raise DataError(
                f"can't be read: {error.strerror}", path=error.filename or path, advice=_ADVICE
            ) from error
        index = cls.parse(data, path, checksum)
        if size is not None and size != index.shard_bytes:
            raise DataError(
                f"the index is of a shard of {index.shard_bytes} bytes, {Path(shard).name} has {size}",
                path=path,
                advice=_ADVICE,
            )
        return index

    @classmethod
    def parse(cls, data: bytes, path: str | os.PathLike[str], checksum: int | None = None) -> GroupIndex:
        """Read the content of an index file; errors name its path.

        Raises:
          DataError: As in `load`.
        """

        def bad(message: str, offset: int, advice: str = _ADVICE) -> DataError:
            return DataError(message, path=path, offset=offset, advice=advice)

        if len(data) < _HEADER.size + _FOOTER.size:
            raise bad(f"{len(data)} bytes are too few for an index: it was cut", len(data))
        magic, version, layout, reserved, count, shard_bytes = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise bad(f"not an index of groups: it begins with {magic!r}, not {_MAGIC!r}", 0)
        if version != _VERSION:
            raise bad(f"version {version} isn't known here, {_VERSION} is", 4, "read it with a newer gmeta")
        expected = _HEADER.size + count * ENTRY.itemsize + _FOOTER.size
        if len(data) != expected:
            raise bad(
                f"{len(data)} bytes, but {count} groups take {expected}: it was cut or appended to",
                min(len(data), expected),
            )
        body, (crc,) = data[: -_FOOTER.size], _FOOTER.unpack(data[-_FOOTER.size :])
        if zlib.crc32(body) != crc:
            raise bad(f"its checksum is {zlib.crc32(body):08x}, {crc:08x} is stored", len(body))
        if checksum not in (None, crc):
            raise bad("it isn't the index that the manifest states: it is of another data set", len(body))
        if layout >= len(LAYOUTS) or reserved:
            raise bad(f"layout {layout}, {reserved} isn't known here", 8, "read it with a newer gmeta")
        groups = np.frombuffer(body, ENTRY, offset=_HEADER.size)
        if wrong := _contradiction(groups, shard_bytes):
            number, message = wrong
            raise bad(f"group {number}: {message}", _HEADER.size + number * ENTRY.itemsize)
        return cls(cast(Layout, LAYOUTS[layout]), shard_bytes, groups)


def checksum_of(data: bytes) -> int:
    """Read the checksum at the end of an index file's content."""
    return int(_FOOTER.unpack(data[-_FOOTER.size :])[0])


def _contradiction(groups: NDArray[Any], shard_bytes: int) -> tuple[int, str] | None:
    """Find the first group with an impossible place, and the reason; return None if all are possible."""
    if not len(groups):
        return (0, f"there is none, in a shard of {shard_bytes} bytes") if shard_bytes else None
    offsets, rows = groups["offset"], groups["rows"]
    ends = np.append(offsets[1:], shard_bytes)
    order = np.lexsort((groups["batch_id"], groups["task"]))
    tasks, batches = groups["task"][order], groups["batch_id"][order]
    twice = np.zeros(len(groups), bool)
    twice[order[1:]] = (tasks[1:] == tasks[:-1]) & (batches[1:] == batches[:-1])  # lexsort is stable
    for wrong, message in (
        (np.arange(len(groups)) < (offsets[0] != 0), "the first one doesn't begin at byte 0 of the shard"),
        (ends <= offsets, "it ends where it begins or before"),
        (rows < 1, "it has no rows"),
        (groups["first_row"] != np.cumsum(rows) - rows, "first_row isn't the sum of the rows before"),
        (twice, "its task and batch_id are those of a group before"),
    ):
        if wrong.any():
            return int(np.argmax(wrong)), message
    return None
