"""SASRec as `gmeta train --for next-item` trains it, by `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gmeta.experiment.next_item.histories import Cuts, Histories, cut
from gmeta.experiment.next_item.models import ModelScorer, build, training_batches
from gmeta.experiment.next_item.ranked import rank
from gmeta.experiment.plan.next_item_config import NextItemConfig, NextItemMethod

import numpy as np
import tensorflow as tf
from parts.next_item.turns import answer, now

SASREC = "sasrec"


class Sasrec:
    """See `parts.next_item.turns.Trainer`.

    Args:
      settings: ``file``, ``threads``, ``seed``, and those of `NextItemMethod` that differ from its defaults.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        file, threads, seed = (settings.pop(name) for name in ("file", "threads", "seed"))
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        self.cuts = read_cuts(Path(file))
        method = NextItemMethod("SASRec", **settings)
        config = NextItemConfig("item", ks=(10,), methods={SASREC: method})
        self.model = build(config, SASREC, seed, self.cuts)
        self.batches = training_batches(self.cuts.train, method, seed, 0)
        self.steps = len(self.batches)

    def train(self, share: float) -> list[float]:
        """Train."""
        start, steps = now(), max(1, round(share * self.steps))
        self.model.fit(self.batches, steps_per_epoch=steps, verbose=0)
        return ((now() - start) * (self.steps / steps)).tolist()

    def measure(self, part: str) -> float:
        """Rank the right item among the items of training, including those of the history."""
        asked = getattr(self.cuts, part)
        ranked = rank(ModelScorer(self.model), asked, self.cuts.items, seen=True, shown=10)
        return float(ranked.of_users(10)["ndcg"].mean())


def read_cuts(file: Path) -> Cuts:
    """Read a file with a user a line, "user item item …", and hold out each user's last two items."""
    rows = [np.array(line.split()[1:], np.int64) for line in file.read_text().splitlines()]
    ids, items = np.unique(np.concatenate(rows), return_inverse=True)
    events = Histories(np.arange(len(rows)), np.cumsum([0, *map(len, rows)]), items.astype(np.int64))
    return cut(events, ids, "leave-last-out")


if __name__ == "__main__":
    answer(Sasrec)
