"""A comparison of rebuilt histories with what the ranker logged of those it saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.data.on_bad import OnBad
from gmeta.core.data.schema import Schema
from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.io.histories.checksum import history_crc
from gmeta.io.reader_stats import ReaderStats

CRC_COLUMN = "history_crc"
"""The examples' column with the checksum of the history that the ranker saw (`gmeta.io.history_crc`)."""
LENGTH_COLUMN = "history_length"
"""The examples' column with the number of events of the history that the ranker saw."""
Check = Literal["crc", "length"]


def need_numbers(schema: Schema, name: str, why: str) -> None:
    """Check that the examples have an int64 column of this name.

    Raises:
      ConfigError: They don't.
    """
    found: object = f"no {name!r}"
    if name in schema:
        found = schema[name]
        if schema[name].dtype == "int64" and not schema[name].is_list:
            return
    raise ConfigError(
        f"late: {why}, an int64 column of what the ranker saw, and the examples have {found}: log it, or "
        "name another column"
    )


@dataclass(frozen=True)
class LoggedCheck:
    """A function that refuses the examples of a batch whose histories differ from the ranker's.

    Attributes:
      check: What is compared.
      column: The examples' column with the ranker's number.
      longest: The most events of a history; a ranker that saw more of them has this length.
      examples: The examples, for messages.
      store: The store, for messages.
      on_bad: ``"skip"`` leaves such an example out, and counts it.
      stats: The counters.

    Raises:
      ConfigError: ``check`` is neither.
    """

    check: Check
    column: str
    longest: int | None
    examples: str
    store: str
    on_bad: OnBad
    stats: ReaderStats | None

    def __post_init__(self) -> None:
        if self.check not in get_args(Check):
            raise ConfigError(f"late: check must be 'crc', 'length' or None, got {self.check!r}")

    def __call__(
        self, batch: dict[str, Any], generations: tf.Tensor, logged: tf.Tensor, rows: tf.Tensor
    ) -> dict[str, Any]:
        """Return the batch without the examples whose histories differ from what was `logged`, (B,).

        `rows` (B,) are the numbers of records that are counted with each.
        """
        histories = list(batch["history"].values())
        if self.check == "crc":
            found = history_crc(histories)
        else:
            found = histories[0].row_lengths()
            logged = logged if self.longest is None else tf.minimum(logged, self.longest)
        sound = load_op_library("io").gmeta_check_histories(
            users=batch["task"],
            generations=generations,
            rows=rows,
            found=found,
            logged=logged,
            examples=self.examples,
            store=self.store,
            check=self.check,
            on_bad=self.on_bad,
            stats=0 if self.stats is None else self.stats.id,
        )
        if self.on_bad == "raise":  # all are sound; the task waits for it
            return {**batch, "task": tf.boolean_mask(batch["task"], sound)}

        def sound_ones() -> dict[str, Any]:
            kept = tf.where(sound)[:, 0]
            return tf.nest.map_structure(lambda part: tf.gather(part, kept), batch)

        return tf.cond(tf.reduce_all(sound), lambda: batch, sound_ones)
