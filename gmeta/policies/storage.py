"""How precise the rows of a `gmeta.ops.HashTable` are."""

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
      owner: What has the setting; errors say its class.
      name: The setting's name.
      value: Its value.
      low: The smallest value allowed.
      high: The largest value allowed.

    Raises:
      ConfigError: It is anything else.
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

    With ``half_life``, rows that are no longer used cool down. The effective frequency of a row that was last
    used n steps ago, by an inserting lookup or an update, is::

      frequency * 2^-k * (1 - r / (2 * half_life))        n = k * half_life + r, 0 <= r < half_life

    so it halves every ``half_life`` steps. Below half of ``threshold``, a row falls back to 16 bits: if its
    frequency is 2^m times the threshold, after m + 1 half-lives without use. This happens at the end of the
    ``apply_gradients`` at which the row's shard is swept: shard i of S (see `Eviction`) where
    ``(step + every * i // S) % every == 0``, ``every = max(1, half_life // 8)``. Its next use brings the row
    back to its frequency, and so to float32. The frequency itself, which `LFU` reads, doesn't decay.

    An update of a half row is computed in float32, and rounded when it is stored:

    * ``"stochastic"``: up or down at random, with probabilities that make the mean the exact number; what
      16 bits hold exactly stays. Updates too small to show by themselves add up, so that a row trains as in
      float32, with noise of at most one unit of the last place an update: of a weight w,
      ``max(2^-10 * |w|, 2^-24)``, and 2^-7 of a slot. The random bits are a function of (table seed, key,
      step, column): runs repeat, on any device, number of threads or ranks.
    * ``"nearest"``: by at most half of that, but always the same way: steps below half a unit of the last
      place are lost. So a slot such as Adam's second moment, which moves by a thousandth in a step, stands
      still.

    Initial rows, imported ones and those that cool down are rounded to nearest. A missing id reads its row as
    it would be stored. Weights beyond ±65504 are stored as that.

    Checkpoints hold float32, which is exact. Restoring puts each row into the precision that it had: it
    follows from the row's frequency and last step, and the table's step.

    Args:
      threshold: Frequency from which a row is float32, >= 2.
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

    A row is in one tier, and a move between them means nothing: rows, optimizer slots,
    statistics, eviction and checkpoints are those of a table in one tier, bit for bit. A clock chooses the
    rows that leave the first tier: it passes a row over once if it was used since it last came by.
    Evaluation reads rows where they are.

    Of a table in host memory, a training lookup brings its rows from the drive first, all reads of a batch at
    once. `gmeta.Pipeline` with ``depth=1`` reads those of the next batch while a batch computes. The drive
    gets appended segments of 256 KiB, and each row is written at most twice in the mean each time it moves
    there; the files take at most twice the bytes of the rows in them. They are scratch: they have no name, a
    process that ends or is killed leaves none, and a restart begins from a checkpoint. If the drive is full
    or fails, the call raises `tf.errors.ResourceExhaustedError` with the file, the offset and what to do.

    On a GPU, lookups and updates reach rows in host memory over the bus, where they are. Only a prefetch
    brings rows up, beside compute: `gmeta.Pipeline` makes one for each batch, ``depth`` batches ahead; a loop
    of one's own calls `gmeta.layers.EmbeddingCollection.prefetch`. Rows that find no room stay in host memory
    (``statistics().crowded``). The index of all keys is in HBM; a table of n keys, with w weights and
    optimizer slots in a row, takes there::

      16 * (slots + n) + hbm_rows * 4 * ceil(w / 4) * 4 bytes,   slots = 2^ceil(log2(n / 0.75))

    With ``ssd``, rows for which ``host_bytes`` have no room go to the drive, those first that were used least
    lately. Whatever trains on a row brings it back first: mostly the prefetch of its batch, else the lookup,
    which then waits for the drive.

    Args:
      host_bytes: Bytes of the rows in host memory after each step; from its lookup to its update, the rows of
        its batch come on top, and of a table on a GPU those of the latest batches, for good. So do, of a
        table in host memory, the key index, at most 28 bytes for each row of a large table wherever it is,
        8 to 16 for each row on the drive, and the segments that fill, at most 32 MiB. A row has 8 bytes, and
        4 for each weight and optimizer slot. The tables of a collection divide the bytes, so that each may
        have as many rows.
      ssd: A folder on a fast local drive. It is made if it isn't there.
      hbm_rows: About how many rows the GPU's memory holds, >= 1: of each table of a collection, so a table
        that has fewer rows takes less. With `TwoPrecisions`, as many rows in half precision, and half as many
        in float32, which takes no more memory.
      lookahead: With ``hbm_rows``: how many batches a prefetch is ahead of its batch's lookup, 0 to 64; of a
        pipeline, its depth. A lookup waits for all but so many of the latest prefetches. Rows that the last
        ``lookahead + 2`` prefetches asked for stay in HBM.

    Raises:
      ConfigError: An argument isn't an integer within its limits; ``host_bytes`` and ``ssd`` are not both
        given, or nothing is; or when a table is made: they are for a table in another place, or the folder
        can't be made or written to.

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
          place: Where the table is asked to be.
          owner: Name of the table, for messages.

        Raises:
          ConfigError: It can't; the message says what to do.
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
        """Return the tiers of the same table in host memory, or None: it has none there."""
        return None if self.ssd is None else Tiers(self.host_bytes, self.ssd)

    def divide(self, row_bytes: Sequence[int]) -> list[Tiers]:
        """Give each table of a collection its tiers: a share of ``host_bytes``, and all ``hbm_rows``.

        Args:
          row_bytes: For each table the bytes of a row, in proportion to which the bytes are divided.
        """
        if self.host_bytes is None:
            return [self] * len(row_bytes)
        whole = sum(row_bytes)
        return [replace(self, host_bytes=max(1, self.host_bytes * one // whole)) for one in row_bytes]

    def folder(self, owner: str) -> str:
        """Make the folder if need be, and return its absolute path; "" if there is none.

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
