"""Finds non-finite numbers in gradients and rows, and names their tables, ids or weights.

A step checks its gradients before it changes anything, and the check must be cheap. It therefore only
computes the sum of squares of each gradient: one op, and one pass over numbers that the step reads anyway. If
all sums are finite, all numbers are. Otherwise, including if a square overflows, the numbers are searched,
where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import NotFiniteError, rows_not_finite
from gmeta.core.graph import keep_whole, refuse_unless
from gmeta.core.shares import LOGICAL_SHARDS
from gmeta.ops.device import DEVICE_NAMES, compute_place

ADVICE = (
    "a derivative is NaN or infinite there, like that of tf.norm, tf.sqrt or a fractional power at 0: keep "
    "the argument away from 0"
)
"""What errors advise if a gradient isn't finite."""

ROWS_ADVICE = (
    "load an earlier checkpoint, or remove these ids from their tables (HashTable.remove), so that they "
    "are reinitialized"
)
"""What errors advise if a row isn't finite."""

_NAMED = 5  # maximum number of gradients or ids in a message
_SHARDS_AT_A_TIME = 32


class NamedGradient(NamedTuple):
    """A gradient, and the table or weight to which it belongs.

    Attributes:
      of: The `gmeta.ops.HashTable`, or the name of the dense weight.
      values: The gradient of a table's rows, (n, dim), or of a dense weight, of any shape.
      keys: A function that returns the rows' keys, (n,) int64; None for a dense weight.
    """

    of: Any
    values: tf.Tensor
    keys: Callable[[], tf.Tensor] | None = None

    @classmethod
    def of_weights(cls, gradients: Iterable[Any], variables: Iterable[tf.Variable]) -> list[NamedGradient]:
        """Name the gradients of dense weights; None gradients are skipped."""
        return [
            cls(variable.name, getattr(gradient, "values", gradient))
            for gradient, variable in zip(gradients, variables, strict=True)
            if gradient is not None
        ]


class GradientCheck(NamedTuple):
    """Whether gradients are finite, in host memory.

    Attributes:
      sound: () bool: whether all sums of squares are finite, and therefore all numbers. It is known first.
      bad: () string: which gradients aren't finite; empty if all are.
    """

    sound: tf.Tensor
    bad: tf.Tensor

    def passes(self) -> tf.Tensor:
        """Return whether all gradients are finite, () bool."""
        return if_unsound(self.sound, lambda: tf.equal(self.bad, ""))


def if_unsound(sound: tf.Tensor, verdict: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return True where ``sound``, else the verdict, () bool in host memory.

    A graph doesn't wait for the verdict's inputs if ``sound``: its merge passes on the first value.
    """
    with tf.device("CPU:0"):
        return tf.cond(sound, lambda: tf.constant(True), verdict)


def check_gradients(gradients: Sequence[NamedGradient], samples: tf.Tensor | float = 1.0) -> GradientCheck:
    """Check whether gradients are finite.

    Args:
      gradients: The gradients, means over samples.
      samples: The number of samples. The sum over them must be finite; with no samples, it is.
    """
    if not gradients:
        return GradientCheck(tf.constant(True), tf.constant(""))
    squares = tf.stack([_sum_of_squares(each.values) for each in gradients])
    with tf.device("CPU:0"):  # where the result is used
        sound = tf.reduce_all(tf.math.is_finite(squares))
    bad = _find_bad(gradients, samples, sound)
    with tf.device("CPU:0"):
        # The condition too: a GPU would get it, and send it back.
        told = tf.cond(sound, lambda: tf.constant(""), lambda: _describe(gradients, bad))
    return GradientCheck(sound, told)


def refuse_bad(gradients: Sequence[NamedGradient], tensors: Any) -> Any:
    """Check gradients before tensors are used.

    Args:
      gradients: The gradients.
      tensors: Any nested structure of tensors.

    Returns:
      The same tensors.

    Raises:
      NotFiniteError: A gradient isn't finite; see `refuse_unless` for the error in graphs.
    """
    check = check_gradients(gradients)
    if tf.executing_eagerly() and not check.bad.numpy():
        return tensors
    sentence = tf.strings.join(
        ["the gradient is NaN or infinite for ", check.bad, f", and nothing was updated: {ADVICE}"]
    )
    return refuse_unless(tensors, check.passes(), sentence, NotFiniteError)


def describe_bad_rows(table: Any) -> str:
    """Describe which rows of a `gmeta.ops.HashTable` hold NaN or infinity; the result is empty if none does.

    It reads the whole table, a range of shards at a time.
    """
    found: list[int] = []
    for first in range(0, LOGICAL_SHARDS, _SHARDS_AT_A_TIME):
        part = table.export_shards(first, first + _SHARDS_AT_A_TIME)
        found.extend(_bad_keys(part.keys, part.rows))
    return name_rows(table, found)


def refuse_bad_rows(table: Any, keys: npt.ArrayLike, rows: npt.ArrayLike) -> None:
    """Refuse rows of a `gmeta.ops.HashTable` that contain NaN or infinity.

    Raises:
      NotFiniteError: A row does; the message names its table and id.
    """
    found = name_rows(table, _bad_keys(keys, rows))
    if found:
        raise NotFiniteError(f"the rows of {found} hold NaN or infinity: {ROWS_ADVICE}")


def name_rows(table: Any, keys: Sequence[int]) -> str:
    """Name at most five rows of a `gmeta.ops.HashTable`; the result is empty if there are none."""
    return _list([name_row(table, key) for key in keys[:_NAMED]], len(keys))


def name_row(table: Any, key: int) -> str:
    """Name a row of a `gmeta.ops.HashTable` by the table and the id that its users gave it."""
    merged = table.merged_keys
    if merged is None or not 0 <= key >> merged.id_bits < len(merged.tables):
        return f"id {key} of table {table.name!r}"
    name, number = merged.id_of(key)
    return f"{'hashed ' * (name in merged.hashed)}id {number} of table {name!r}"


def _bad_keys(keys: npt.ArrayLike, rows: npt.ArrayLike) -> list[int]:
    return np.asarray(keys)[rows_not_finite(rows)].tolist()


def _sum_of_squares(values: Any) -> tf.Tensor:
    values = tf.convert_to_tensor(values)
    wide = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
    return tf.cast(tf.nn.l2_loss(wide), tf.float32)


def _find_bad(
    gradients: Sequence[NamedGradient], samples: tf.Tensor | float, sound: tf.Tensor
) -> list[tf.Tensor]:
    """Find the numbers that aren't finite.

    Returns:
      Which gradients of dense weights hold such a number, (weights,) bool; then for each gradient of a table
      which of its rows do, (n,) bool. All of them are empty if ``sound``, a () bool in host memory.
    """
    of_rows = [each for each in gradients if each.keys is not None]

    def search() -> list[tf.Tensor]:
        dense, rows = [tf.zeros([0], tf.bool)], []
        for each in gradients:
            values = tf.convert_to_tensor(each.values)
            bad = ~tf.math.is_finite(tf.math.multiply_no_nan(values, tf.cast(samples, values.dtype)))
            if each.keys is None:
                dense.append(tf.reshape(tf.reduce_any(bad), [1]))
            else:
                rows.append(tf.reduce_any(bad, axis=1))
        return [tf.concat(dense, axis=0), *rows]

    # One op: a step that isn't searched would have to pass a switch for each gradient.
    with tf.device(DEVICE_NAMES[compute_place()]):
        found = tf.cond(sound, lambda: [tf.zeros([0], tf.bool) for _ in range(1 + len(of_rows))], search)
    keep_whole(found[0])
    return found


def _describe(gradients: Sequence[NamedGradient], bad: Sequence[tf.Tensor]) -> tf.Tensor:
    """Name the gradients and the keys that `_find_bad` has found, () string."""
    # TensorFlow never frees `describe`, so it must not reference the tables.
    owners = [each.of if isinstance(each.of, str) else weakref.ref(each.of) for each in gradients]

    def describe(*tensors: tf.Tensor) -> str:
        weights, *rest = (each.numpy() for each in tensors)
        of_weights, of_rows = iter(weights), zip(rest[: len(rest) // 2], rest[len(rest) // 2 :], strict=True)
        parts = []
        for owner in owners:
            if isinstance(owner, str):
                parts += [owner] if next(of_weights) else []
                continue
            rows, given = next(of_rows)
            found = list(dict.fromkeys(given[rows].tolist()))
            if found:
                named = name_row(owner(), found[0])
                parts.append(named + (f" and {len(found) - 1} more" if len(found) > 1 else ""))
        return _list(parts[:_NAMED], len(parts))

    with tf.device("CPU:0"):
        keys = [each.keys() for each in gradients if each.keys is not None]
        return tf.ensure_shape(tf.py_function(describe, [*bad, *keys], tf.string), [])


def _list(names: Sequence[str], count: int) -> str:
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return ", ".join(names) + more
