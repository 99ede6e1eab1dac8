"""The precision of the rows of a `gmeta.ops.HashTable`, and the memory that holds them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from gmeta.core.errors import ConfigError

# Checks the integers of settings.


def check_whole(owner: object, name: str, value: object, low: int, high: float = math.inf) -> None:
    """Check that a setting is an integer from ``low`` to ``high``.

    Args:
      owner: The object that has the setting; errors name its class.
      name: The setting's name.
      value: Its value.
      low: The smallest value allowed.
      high: The largest value allowed.

    Raises:
      ConfigError: It isn't such an integer.
    """
    if not (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
        limit = f"of at least {low}" if high == math.inf else f"from {low} to {high:.0f}"
        raise ConfigError(f"{type(owner).__name__}: {name} must be an integer {limit}, got {value!r}")


@dataclass(frozen=True)
class TwoPrecisions:
    """Keeps rows that are rarely used in half precision (MTGenRec, appendix C).

    A row has its weights in float16 and its optimizer slots in bfloat16 while its frequency, the number of
    inserting lookups that have read it, is below ``threshold``. The lookup that brings it to ``threshold``
    promotes it to float32. A half record has 8 bytes + 2 for each weight and slot, instead of 4.

    With ``half_life``, rows that are no longer used return to half precision. The effective frequency of a
    row that was last used n steps ago, by an inserting lookup or an update, is::

      frequency * 2^-k * (1 - r / (2 * half_life))        n = k * half_life + r, 0 <= r < half_life

    so it halves every ``half_life`` steps. Below half of ``threshold``, a row falls back to 16 bits: if its
    frequency is 2^m times the threshold, after m + 1 half-lives without use. This happens at the end of the
    ``apply_gradients`` at which the row's shard is swept: shard i of S (see `Eviction`) where
    ``(step + every * i // S) % every == 0``, ``every = max(1, half_life // 8)``. Its next use brings the row
    back to its frequency, and so to float32. The frequency itself, which `LFU` reads, doesn't decay.

    An update of a half row is computed in float32, and rounded when it is stored:

    * ``"stochastic"``: up or down at random, with probabilities whose mean is the exact number; a number that
      16 bits represent exactly is unchanged. Updates that are too small to change the stored number
      accumulate on average, so a row trains as in float32, with noise of at most one unit in the last place
      per update: ``max(2^-10 * |w|, 2^-24)`` for a weight w, and 2^-7 of a slot. The random bits are a
      function of (table seed, key, step, column): runs are reproducible, on any device and with any number of
      threads or ranks.
    * ``"nearest"``: the error is at most half of that, but always in the same direction: updates below half a
      unit in the last place are lost. So a slot such as Adam's second moment, which changes by a thousandth
      in a step, never changes.

    Initial rows, imported rows, and rows that return to half precision are rounded to nearest. A missing id
    reads its row as it would be stored. Weights beyond ±65504 are stored as ±65504.

    Checkpoints hold float32, which is exact. Restoring gives each row the precision that it had, which
    follows from the row's frequency and last step, and the table's step.

    Args:
      threshold: The frequency from which a row is float32, >= 2.
      half_life: Steps without use that halve a row's effective frequency, from 1 to 2^31 - 1. None: a row
        that is float32 stays so.
      rounding: ``"stochastic"`` or ``"nearest"``.

    Raises:
      ConfigError: A number out of its range, or another rounding.

    Example:
      >>> table = HashTable(64, precision=TwoPrecisions(threshold=10, half_life=100_000))
    """

    threshold: int
    half_life: int | None = None
    rounding: Literal["stochastic", "nearest"] = "stochastic"

    def __post_init__(self) -> None:
        check_whole(self, "threshold", self.threshold, 2, 2**32 - 1)
        if self.half_life is not None:
            check_whole(self, "half_life", self.half_life, 1, 2**31 - 1)
        if self.rounding not in ("stochastic", "nearest"):
            raise ConfigError(
                f"TwoPrecisions: rounding must be 'stochastic' or 'nearest', got {self.rounding!r}"
            )


# Which memory holds the rows of a `gmeta.ops.HashTable`.


@dataclass(frozen=True, repr=False)
class Tiers:
    """Keeps a bounded part of a table's rows in a fast tier, and the others in a larger, slower one.

    ==============  ===========================================================  ====================
    the table       its tiers, the fastest first                                 arguments
    ==============  ===========================================================  ====================
    in host memory  ``host_bytes`` of memory, files in the folder ``ssd``        host_bytes, ssd
    on a GPU        ``hbm_rows`` rows of HBM, pinned host memory                 hbm_rows, lookahead
    on a GPU        ``hbm_rows`` rows of HBM, ``host_bytes`` of pinned memory,   all
                    files in the folder ``ssd``
    ==============  ===========================================================  ====================

    A row is in one tier, and moving it has no effect on results: rows, optimizer slots, statistics, eviction
    and checkpoints are those of a table in one tier, bit for bit. The clock algorithm chooses the rows that
    leave the first tier: it skips a row once if the row was used since the clock's last pass. Evaluation
    reads rows where they are.

    For a table in host memory, a training lookup first reads its rows from the drive, all reads of a batch at
    once. `gmeta.Pipeline` with ``depth=1`` reads those of the next batch while a batch computes. Segments of
    256 KiB are appended to files on the drive, and each row is written at most twice on average each time it
    moves there; the files take at most twice the bytes of the rows in them. They are scratch files without
    names: a process that ends or is killed leaves none, and a restart begins from a checkpoint. If the drive
    is full or fails, the call raises `tf.errors.ResourceExhaustedError` with the file, the offset and advice.

    On a GPU, lookups and updates access rows in host memory over the bus. Only a prefetch moves rows to the
    GPU, beside compute: `gmeta.Pipeline` makes one for each batch, ``depth`` batches ahead; custom training
    loops call `gmeta.layers.EmbeddingCollection.prefetch`. Rows for which HBM has no room stay in host memory
    (``statistics().crowded``). The index of all keys is in HBM; there, a table of n keys, with w weights and
    optimizer slots in a row, takes::

      16 * (slots + n) + hbm_rows * 4 * ceil(w / 4) * 4 bytes,   slots = 2^ceil(log2(n / 0.75))

    With ``ssd``, rows for which ``host_bytes`` has no room move to the drive, the least recently used ones
    first. Before a row is trained it is read back: usually by the prefetch of its batch, otherwise by the
    lookup, which then waits for the drive.

    Args:
      host_bytes: Bytes of the rows in host memory after each step. From lookup to update, a step takes the
        rows of its batch in addition; a table on a GPU always takes those of the latest batches in addition.
        A table in host memory also takes the key index, at most 28 bytes for each row of a large table in any
        tier, 8 to 16 bytes for each row on the drive, and at most 32 MiB of unfinished segments. A row has 8
        bytes, and 4 for each weight and optimizer slot. The tables of a collection divide the bytes, so that
        each holds the same number of rows.
      ssd: A folder on a fast local drive. It is created if it doesn't exist.
      hbm_rows: About how many rows the GPU's memory holds, >= 1: of each table of a collection, so a table
        that has fewer rows takes less. With `TwoPrecisions`, as many rows in half precision, and half as many
        in float32, which takes no more memory.
      lookahead: With ``hbm_rows``: how many batches a prefetch is ahead of its batch's lookup, 0 to 64; of a
        pipeline, its depth. A lookup waits for all prefetches but the latest ``lookahead`` ones. Rows that
        the last ``lookahead + 2`` prefetches requested stay in HBM.

    Raises:
      ConfigError: An argument isn't an integer within its limits; only one of ``host_bytes`` and ``ssd`` is
        given, or nothing is; or, when a table is created, the tiers don't fit its device, or the folder can't
        be created or written to.

    Example:
      >>> tiers = Tiers(host_bytes=8 << 30, ssd="/nvme/rows")
      >>> collection = EmbeddingCollection([FeatureConfig("item", dim=64)], tiers=tiers)  # doctest: +SKIP
      >>> EmbeddingCollection(  # doctest: +SKIP
      ...     [FeatureConfig("item", dim=64)], device="gpu", tiers=Tiers(hbm_rows=10_000_000)
      ... )
    """

    host_bytes: int | None = None
    ssd: str | None = None
    hbm_rows: int | None = None
    lookahead: int = 2

    def __post_init__(self) -> None:
        if (self.host_bytes is None) != (self.ssd is None):
            raise ConfigError(
                f"Tiers: host_bytes and ssd go together, got {self.host_bytes!r} and {self.ssd!r}: give "
                "both, or neither for a table on a GPU that keeps its other rows in host memory"
            )
        if self.ssd is not None:
            check_whole(self, "host_bytes", self.host_bytes, 1)
            object.__setattr__(self, "ssd", os.fspath(self.ssd))
        elif self.hbm_rows is None:
            raise ConfigError(
                "Tiers: no tier is given: give host_bytes and ssd for a table in host memory, or hbm_rows "
                "for one on a GPU"
            )
        check_whole(self, "lookahead", self.lookahead, 0, 64)
        if self.hbm_rows is not None:
            check_whole(self, "hbm_rows", self.hbm_rows, 1, 2**53)
        elif self.lookahead != Tiers.lookahead:
            raise ConfigError(
                f"Tiers: lookahead={self.lookahead} goes with hbm_rows, which isn't given: leave it out"
            )

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = (f"{name}={value!r}" for name, value in given.items() if value != getattr(Tiers, name))
        return f"Tiers({', '.join(changed)})"

    def check(self, place: str, owner: str) -> None:
        """Check that a table in ``place``, ``"cpu"`` or ``"gpu"``, can have these tiers.

        Args:
          place: The device that the table is to be on.
          owner: Name of the table, for messages.

        Raises:
          ConfigError: It can't; the message gives advice.
        """
        if place == "gpu" and self.hbm_rows is None:
            raise ConfigError(
                f"{owner}: a table on a GPU has its first tier there, but tiers are {self}: add hbm_rows, or "
                "keep the table in host memory (device='cpu')"
            )
        if place == "cpu" and self.hbm_rows is not None:
            raise ConfigError(
                f"{owner}: hbm_rows={self.hbm_rows} is for a table on a GPU, and this one is in host memory: "
                "make it with device='gpu', or give Tiers(host_bytes=..., ssd=...) alone, or no tiers"
            )

    def without_gpu(self) -> Tiers | None:
        """Return the tiers of the same table in host memory, or None if it has none there."""
        return None if self.ssd is None else Tiers(self.host_bytes, self.ssd)

    def divide(self, row_bytes: Sequence[int]) -> list[Tiers]:
        """Give each table of a collection its tiers: a share of ``host_bytes``, and all ``hbm_rows``.

        Args:
          row_bytes: For each table the bytes of a row; the bytes are divided in proportion to them.
        """
        if self.host_bytes is None:
            return [self] * len(row_bytes)
        whole = sum(row_bytes)
        return [replace(self, host_bytes=max(1, self.host_bytes * one // whole)) for one in row_bytes]

    def folder(self, owner: str) -> str:
        """Create the folder if it doesn't exist, and return its absolute path; "" if no folder is set.

        Args:
          owner: Name of the table, for messages.
        """
        if self.ssd is None:
            return ""
        path = Path(self.ssd).absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{owner}: the folder {path}, for rows on a drive, can't be made: {error.strerror}: name "
                "another one (Tiers.ssd)"
            ) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"{owner}: the folder {path} can't be written to: name another one (Tiers.ssd)")
        return str(path)
