"""A split of a prepared data set: its schema, its shards, and whether the shards match the manifest."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gmeta.core.data_manifest import Manifest, Shard
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import ReadablePath
from gmeta.core.group_index import SUFFIX, GroupIndex, Layout
from gmeta.core.json_values import FILE_NAME
from gmeta.core.schema import OnBad, Roles, Schema
from gmeta.io.readers.remote import locate

_MOST = 8  # splits or data sets that a message names


@dataclass(frozen=True)
class PreparedSplit:
    """Description of a split for readers.

    Attributes:
      folder: The data set's folder, on a local or another file system.
      schema: The columns of every row.
      roles: The roles of the columns.
      layout: How rows are encoded.
      shards: The shards that contain groups, in order.
      digest: The digest of the data set and the split's name. Splits with the same digest contain the same
        groups in the same order.
    """

    folder: ReadablePath
    schema: Schema
    roles: Roles
    layout: Layout
    shards: Sequence[Shard]
    digest: str

    @property
    def groups(self) -> int:
        """The number of groups in all shards."""
        return sum(shard.groups for shard in self.shards)

    @property
    def rows(self) -> int:
        """The number of rows in all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def files(self) -> list[str]:
        """The shards' paths."""
        return [os.fspath(self.folder / shard.name) for shard in self.shards]

    def window(self, bytes_in_memory: int) -> int:
        """Count the average-size groups that fit into ``bytes_in_memory``; at least 1, at most all."""
        size = max(1, sum(shard.bytes for shard in self.shards) // max(1, self.groups))
        return max(1, min(self.groups, bytes_in_memory // size))

    def rows_of_groups(self) -> Iterator[NDArray[np.int64]]:
        """Yield the numbers of rows of a shard's groups, from the index beside it, for each shard in order.

        Raises:
          DataError: An index is missing, damaged, or of another data set.
        """
        for shard in self.shards:
            file = self.folder / f"{shard.name}{SUFFIX}"
            try:
                data = file.read_bytes()
            except OSError as error:
                raise DataError(
                    f"can't be read: {error.strerror}", path=file, advice="prepare the data set again"
                ) from error
            yield GroupIndex.parse(data, file, shard.index).groups["rows"]


def open_split(path: str | os.PathLike[str], on_bad: OnBad = "raise") -> PreparedSplit:
    """Read the manifest of the split that a path such as ``data/warm`` names.

    Args:
      path: The folder that `gmeta prepare` wrote, followed by the name of a split.
      on_bad: ``"raise"``: every shard must have the size that the manifest states. ``"skip"``: a shard of
        another size causes a warning, and is read as far as possible.

    Raises:
      ConfigError: There is no such split, or no data set in the folder.
      DataError: The manifest can't be read, or doesn't match its shards; or the split holds no group.
    """
    path = locate(path)
    if isinstance(path, Path):
        _check_there(path)
    manifest = Manifest.load(path.parent, check_shards=on_bad == "raise")
    if path.name not in manifest.splits:
        raise ConfigError(
            f"{path.parent} has no split {path.name!r}; it has {', '.join(manifest.splits) or 'none'}"
        )
    split = manifest.splits[path.name]
    if split.groups == 0:
        raise DataError("the split holds no group", path=path, advice="prepare it with more data")
    for shard in split.shards:
        file = path.parent / shard.name
        if on_bad == "skip" and file.exists() and file.stat().st_size != shard.bytes:
            warnings.warn(f"{file}: not as long as the manifest says; reading what is there", stacklevel=3)
    digest = hashlib.sha256(f"{manifest.digest} {path.name}".encode()).hexdigest()
    # With few groups and many shards, some shards are empty; otherwise, a file without records is an error.
    full = tuple(shard for shard in split.shards if shard.groups > 0)
    return PreparedSplit(path.parent, manifest.schema, manifest.roles, manifest.layout, full, digest)


def _check_there(path: Path) -> None:
    """Refuse a path that isn't inside a data set, and name the splits that exist instead."""
    folder = path.parent
    own = (path / FILE_NAME).exists()
    if (folder / FILE_NAME).exists() or not (own or folder.is_dir()) or any(folder.glob("*.tfrecord")):
        return  # `Manifest.load` refuses a missing folder, and shards without their manifest
    if own:
        found = [path / FILE_NAME]
    else:
        found = sorted(path.glob(f"*/{FILE_NAME}")) or sorted(folder.glob(f"*/{FILE_NAME}"))
    splits = [f"{manifest.parent / name}" for manifest in found[:_MOST] for name in _splits(manifest)]
    raise ConfigError(
        f"{path} is no split of a prepared data set: name FOLDER/SPLIT, where FOLDER is what `gmeta prepare "
        f"--out` made" + (f"; there are {', '.join(splits[:_MOST])}" if splits else "")
    )


def _splits(manifest: Path) -> list[str]:
    try:
        return list(Manifest.load(manifest.parent, check_shards=False).splits)
    except DataError:
        return []


# The columns that a reader returns: the requested ones, or defaults from the manifest.

Label = str | tuple[str, ...]


def choose_label(what: str, schema: Schema, roles: Roles, label: str | Sequence[str] | None) -> Label:
    """Return the name of the label column, or several names.

    Args:
      what: The reader, for messages.
      schema: The columns.
      roles: Their roles.
      label: The requested column or columns; None: the label that was passed to `gmeta prepare`.

    Raises:
      ConfigError: A label isn't a column of one value per row, or neither ``label`` nor ``roles`` names one.
    """
    if label is None:
        if roles.label is None:
            raise ConfigError(
                f"{what}: the data set was prepared without a label: say label=COLUMN, or prepare it with "
                f"--label; it has {', '.join(column.name for column in schema)}"
            )
        label = roles.label
    names = (label,) if isinstance(label, str) else tuple(label)
    for name in names:
        if schema[name].is_list or name in (schema.task, schema.batch):
            raise ConfigError(
                f"{what}: label={name!r} must be a column of one value a record, and not the key's"
            )
        if name in roles.hashed:
            raise ConfigError(
                f"{what}: label={name!r} is hashed text, and its numbers have no meaning: prepare the data "
                "set with a number as the label"
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{what}: label must name a column, or several, each once; got {list(names)}")
    return label if isinstance(label, str) else names


def choose_features(
    what: str, schema: Schema, features: Sequence[str] | None, kept_back: Collection[str | None]
) -> list[str]:
    """Return the names of the feature columns.

    Args:
      what: The reader, for messages.
      schema: The columns.
      features: The requested columns; None: all except the batch and those in ``kept_back``.
      kept_back: Columns that are features only if requested.

    Raises:
      ConfigError: A name isn't a column, appears twice, or is the batch.
    """
    if features is None:
        return [c.name for c in schema if c.name != schema.batch and c.name not in kept_back]
    if isinstance(features, str) or len(set(features)) < len(features):
        raise ConfigError(f"{what}: features must be a list of columns, each once; got {features!r}")
    for name in features:
        if schema[name].name == schema.batch:
            raise ConfigError(f"{what}: {name!r} numbers the batches of a task, it is no feature")
    return list(features)


def choose_weight(what: str, schema: Schema, name: str | None) -> str | None:
    """Return the name of the weight column.

    Raises:
      ConfigError: The column isn't a float32 column of one value per row.
    """
    if name is not None and (schema[name].dtype != "float32" or schema[name].is_list):
        raise ConfigError(f"{what}: weight={name!r} must be a float32 column of one value a record")
    return name
