"""The columns that a reader returns: the named ones, or defaults from the manifest."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gmeta.core.data.roles import Roles
from gmeta.core.data.schema import Schema
from gmeta.core.errors import ConfigError

Label = str | tuple[str, ...]


def choose_label(what: str, schema: Schema, roles: Roles, label: str | Sequence[str] | None) -> Label:
    """Return the name of the label's column, or several names.

    Args:
      what: The reader, for messages.
      schema: The columns.
      roles: What they are for.
      label: The requested column or columns; None: the label that was given to `gmeta prepare`.

    Raises:
      ConfigError: A label isn't a column of one value a row, or neither ``label`` nor ``roles`` names one.
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
    """Return the names of the features' columns.

    Args:
      what: The reader, for messages.
      schema: The columns.
      features: The requested columns; None: all except the batch and those in ``kept_back``.
      kept_back: Columns that are features only if requested.

    Raises:
      ConfigError: A name is no column, appears twice, or is the batch.
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
    """Return the name of the weights' column.

    Raises:
      ConfigError: The column isn't a float32 column of one value a row.
    """
    if name is not None and (schema[name].dtype != "float32" or schema[name].is_list):
        raise ConfigError(f"{what}: weight={name!r} must be a float32 column of one value a record")
    return name
