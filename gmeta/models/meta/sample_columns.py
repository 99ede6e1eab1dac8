"""Conversion of sample columns (NumPy arrays, lists or tensors) into the inputs of one graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import FeatureConfig
from gmeta.layers.embedding.feature_config import PADDING, TEXT_PADDING
from gmeta.layers.embedding.merge_plan import MergedTable

Array = npt.NDArray[Any]


class SampleColumns:
    """The columns that samples consist of: the ids of features, and columns of numbers.

    Args:
      features: The embedded features.
      tables: Their tables.
      numbers: Names of the columns that a network takes without embedding.
    """

    def __init__(
        self,
        features: Sequence[FeatureConfig],
        tables: Iterable[MergedTable],
        numbers: Iterable[str] = (),
    ) -> None:
        limits = {part.name: table.id_limit for table in tables for part in table.features}
        self._ids = {feature.name: feature.combiner is not None for feature in features}
        # None: the feature hashes its ids, so it takes any integer, and text.
        self._limits = {
            f.name: None if f.hash else min(limits[part.name] for part in f.parts) for f in features
        }
        self._numbers = tuple(numbers)

    def samples(self, given: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Convert one set of samples; all columns must have the same length.

        Args:
          given: Column -> values; other columns are ignored.
          what: The name of the samples in errors.

        Returns:
          Column -> array; if samples have different numbers of ids, (flat ids, number of ids per sample).

        Raises:
          ConfigError: A column is missing, or has another length or another kind.
        """
        if not names_columns(given):
            raise ConfigError(f"{what} must map features to values, got {type(given).__name__}")
        missing = [name for name in (*self._ids, *self._numbers) if name not in given]
        if missing:
            raise ConfigError(f"{what} lacks {', '.join(missing)}; it has {', '.join(given)}")
        columns: dict[str, Any] = {
            name: _ids(given[name], several, self._limits[name], f"{what}[{name!r}]")
            for name, several in self._ids.items()
        }
        columns |= {name: _numbers(given[name], f"{what}[{name!r}]") for name in self._numbers}
        lengths = {name: length(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} {count}" for name, count in lengths.items())
            raise ConfigError(f"{what}: columns have different numbers of samples: {found}")
        return columns

    def numbers(self, samples: Mapping[str, Any], what: str) -> dict[str, Array]:
        """Return the columns of numbers among ``samples``, keyed by their names in errors."""
        return {f"{what}[{name!r}]": samples[name] for name in self._numbers}

    def join(self, sets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Concatenate sets of samples into columns that can become tensors."""
        joined: dict[str, Any] = {}
        for name, several in self._ids.items():
            parts = [each[name] for each in sets]
            ranks = {part.ndim if isinstance(part, np.ndarray) else 2 for part in parts}
            if len(ranks) > 1:
                raise ConfigError(f"feature {name!r} has one id per sample in some tasks, several in others")
            joined[name] = _concat_ids(parts, several)
        for name in self._numbers:
            parts = [each[name] for each in sets]
            joined[name] = np.concatenate(parts) if parts else np.zeros([0], np.float32)
        return joined


def names_columns(given: Any) -> bool:
    """Return whether an object is a mapping of columns: a dict, or a pandas DataFrame."""
    return isinstance(given, Mapping) or (hasattr(given, "keys") and hasattr(given, "columns"))


def check_finite(numbers: Mapping[str, Array]) -> None:
    """Refuse samples whose NaN or infinity would make all that adapts NaN.

    Args:
      numbers: Name of an array in errors -> the array, (samples, ...).

    Raises:
      ConfigError: An array holds NaN or infinity; the message names the first place.
    """
    for what, array in numbers.items():
        if not np.isfinite(array).all():
            first = int(np.argwhere(~np.isfinite(array))[0, 0])
            raise ConfigError(
                f"{what} holds {array[first]} in sample {first}, which would make all adapted weights NaN: "
                "leave such samples out, or fill in a value"
            )


def length(column: Any) -> int:
    """Return the number of samples in a column of `SampleColumns.samples`."""
    return len(column if isinstance(column, np.ndarray) else column[1])


def label_array(given: Any, what: str) -> Array:
    """Convert labels to (samples,) or (samples, labels), float32."""
    found = _numbers(given, what)
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found


def _ids(given: Any, several: bool, limit: int | None, what: str) -> Any:
    if isinstance(given, tf.SparseTensor):
        given = tf.RaggedTensor.from_value_rowids(given.values, given.indices[:, 0], given.dense_shape[0])
    if isinstance(given, tf.RaggedTensor):
        if given.ragged_rank != 1 or given.shape.rank != 2:
            raise ConfigError(f"{what} must be ragged ids of shape (samples, None), got {given.shape}")
        return _integers(given.flat_values, limit, what), np.asarray(given.row_lengths(), np.int64)
    try:
        array = np.asarray(given)
    except ValueError:  # lists of different lengths
        array = np.empty(1, object)
    if not array.ndim:
        raise ConfigError(f"{what} must have ids for each sample, got {given!r}")
    rows_of_ids = array.dtype == object and not all(isinstance(each, str | bytes) for each in array.flat)
    if rows_of_ids or (several and not array.size):
        rows = [np.asarray(row) for row in given]
        flat = np.concatenate([row.reshape(-1) for row in rows if row.size] or [np.zeros(0, np.int64)])
        return _integers(flat, limit, what), np.array([row.size for row in rows], np.int64)
    if array.ndim not in (1, 2):
        raise ConfigError(f"{what} must be (samples,), (samples, ids) or ragged, got shape {array.shape}")
    ids = _integers(array, limit, what, several and array.ndim == 2)
    if several and ids.ndim == 2:
        present = ids != (TEXT_PADDING if ids.dtype == object else PADDING)
        if not present.all():
            return ids[present], present.sum(axis=1)
    return ids


def _integers(given: Any, limit: int | None, what: str, padded: bool = False) -> Array:
    array = np.asarray(given)
    if limit is None and array.dtype.kind in "OSU":
        return _texts(array, what)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        text = array.dtype.kind in "OSU"
        remedy = ": FeatureConfig(..., hash=True) takes text" if text else ""
        raise ConfigError(f"{what} must be integer ids, got {'text' if text else array.dtype}{remedy}")
    if (
        limit is not None
        and array.size
        and (array.min() < (PADDING if padded else 0) or array.max() >= limit)
    ):
        wrong = array.min() if array.min() < (PADDING if padded else 0) else array.max()
        raise ConfigError(
            f"{what} holds the id {wrong}; ids are from 0 on and below {limit}, and with "
            "FeatureConfig(..., hash=True) any number is one. For several ids per sample pass lists, a "
            "tf.RaggedTensor, or, for a feature with a combiner, a matrix filled up with -1"
        )
    return array.astype(np.int64, copy=False)


def _texts(array: Array, what: str) -> Array:
    """Convert texts to an array of bytes objects, which can become a tensor directly."""
    found = np.empty(array.shape, object)
    for place, text in np.ndenumerate(array):
        if not isinstance(text, str | bytes):
            raise ConfigError(f"{what} must be integer ids or text, got {text!r}")
        found[place] = text.encode() if isinstance(text, str) else bytes(text)
    return found


def _numbers(given: Any, what: str) -> Array:
    try:
        array = np.asarray(given)
        if (
            array.dtype.kind in "USV"
        ):  # NumPy would read "5" as a number, and stop at the first that isn't one
            raise TypeError(f"got text, such as {array.item(0)!r}")
        array = array.astype(np.float32)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{what} must be numbers: {error}") from error
    if array.ndim == 0:
        raise ConfigError(f"{what} must have one value for each sample, got a single number")
    return array


def _concat_ids(parts: Sequence[Any], several: bool) -> Any:
    widths = {part.shape[1:] for part in parts if isinstance(part, np.ndarray)}
    if all(isinstance(part, np.ndarray) for part in parts) and len(widths) <= 1:
        if parts:
            return np.concatenate(parts)
        return _ragged(np.zeros(0, np.int64), np.zeros(0, np.int64)) if several else np.zeros(0, np.int64)
    flat, lengths = [], []
    for part in parts:
        if isinstance(part, np.ndarray):
            part = part.reshape(-1), np.full(len(part), part.shape[1], np.int64)
        flat.append(part[0])
        lengths.append(part[1])
    return _ragged(np.concatenate(flat), np.concatenate(lengths))


def _ragged(flat: Array, lengths: Array) -> tf.RaggedTensor:
    splits = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return tf.RaggedTensor.from_row_splits(flat, splits, validate=False)
