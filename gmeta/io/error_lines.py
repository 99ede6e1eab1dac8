"""Extraction of gmeta's one-line message from the errors that TensorFlow and Keras wrap around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from gmeta.core.errors import DataError

# The native reader marks its line (ToStatus in io/group_batch/kernels.cc); TensorFlow appends the node and
# the op, on the same line or the next. `tf.debugging.Assert` escapes the line, its end included.
_LINE = re.compile(r"gmeta: (?P<line>[^\n]*?)(?=\s*(?:\\n|\[\[\{\{node|\[Op:|\n|$))")
_PARTS = re.compile(r"(?P<path>.*?)(?: at byte (?P<offset>\d+))?: (?P<message>.*?)(?:; (?P<advice>[^;]*))?$")
_CARDINALITY = re.compile(
    r"Input dataset was expected to contain (\d+) elements but contained (only|at least) (\d+)"
)


def as_data_error(error: BaseException) -> DataError | None:
    """Return the data error inside a ``tf.errors.OpError``, or None if the error is about something else.

    When iterating a dataset, and even more so in Keras' ``fit``, TensorFlow reports a bad record in a long
    text with the graph's node in it. This function extracts the reader's own line from it.

    Args:
      error: The error that was raised.

    Returns:
      An error whose text is "FILE at byte OFFSET: what; what to do", with ``path`` and ``offset`` set.

    Example:
      >>> try:
      ...     model.fit(tasks("data/warm"))
      ... except tf.errors.OpError as error:
      ...     raise (as_data_error(error) or error) from error
    """
    text = str(getattr(error, "message", error))
    if found := _LINE.search(text):
        line = _unescape(found["line"]) if text.startswith("\\n", found.end()) else found["line"]
        if parts := _PARTS.match(line):
            offset = parts["offset"]
            return DataError(
                parts["message"],
                path=parts["path"],
                offset=None if offset is None else int(offset),
                advice=parts["advice"],
            )
        return DataError(line)
    if found := _CARDINALITY.search(text):
        held = "fewer" if found[2] == "only" else "more"
        return DataError(
            f"the manifest promises {found[1]} batches, the shards hold {held}",
            advice="prepare the data again with `gmeta prepare`",
        )
    return None


def _unescape(line: str) -> str:
    """Remove C's escapes, of quotes and of bytes in octal, from a line."""

    def byte(found: re.Match[bytes]) -> bytes:
        return bytes([int(found[1], 8)]) if found[1].isdigit() else found[1]

    return re.sub(rb"\\([0-3][0-7]{2}|.)", byte, line.encode()).decode(errors="replace")


@contextmanager
def data_errors() -> Iterator[None]:
    """Raise `DataError` instead of TensorFlow's error when a dataset finds bad data.

    Raises:
      DataError: A bad record, file or group was read inside the ``with`` block.

    Example:
      >>> with data_errors():
      ...     for batch in tasks("data/warm"):
      ...         ...
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        found = as_data_error(error)
        if found is None:
            raise
        raise found from error
