"""Drawn batches of sequences ``[contexts | history | targets]``, for tests of what attends to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gmeta.ops import AttentionMask
from gmeta.testing.reference.sequence.attention import sees
from gmeta.testing.reference.sequence.hstu import row_times

Array = npt.NDArray[Any]


class DrawnSequences(NamedTuple):
    """A batch, and what the reference forms need to know of it."""

    x: Array
    offsets: Array
    contexts: Array
    targets: Array
    times: Array
    row_times: Array
    masks: list[Array]

    def only(self, sequence: int) -> DrawnSequences:
        """One of the sequences, alone."""
        begin, end = self.offsets[sequence : sequence + 2]
        one = slice(sequence, sequence + 1)
        return DrawnSequences(
            self.x[begin:end],
            np.array([0, end - begin]),
            self.contexts[one],
            self.targets[one],
            self.times[begin:end],
            self.row_times[begin:end],
            self.masks[one],
        )

    @property
    def arguments(self) -> dict[str, Array]:
        """Those of a layer's call, besides the sequences."""
        return {"contexts": self.contexts, "targets": self.targets, "times": self.times}


def draw_sequences(
    seed: int, sizes: Sequence[tuple[int, int, int]], dim: int, mask: AttentionMask
) -> DrawnSequences:
    """Random tokens and times.

    Args:
      seed: Of both.
      sizes: For each sequence how many contextual tokens, tokens of the history, and targets.
      dim: Numbers of a token.
      mask: Who sees whom.
    """
    random = np.random.default_rng(seed)
    contexts, history, targets = np.array(sizes, np.int64).reshape(-1, 3).T
    lengths = contexts + history + targets
    times = [np.sort(random.integers(0, 10 ** random.integers(1, 9), length)) for length in lengths]
    rows = [row_times(t.tolist(), c, g) for t, c, g in zip(times, contexts, targets, strict=True)]
    masks = [
        sees(mask, int(n), int(c), int(g), t.tolist())
        for n, c, g, t in zip(lengths, contexts, targets, times, strict=True)
    ]
    none = [np.zeros(0, np.int64)]
    return DrawnSequences(
        random.normal(size=(int(lengths.sum()), dim)),
        np.cumsum([0, *lengths]),
        contexts,
        targets,
        np.concatenate([*none, *times]),
        np.concatenate([*none, *(np.array(r, np.int64) for r in rows)]),
        masks,
    )
