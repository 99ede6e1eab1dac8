"""The recipe's SASRec (models/hstu), trained by `fit`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import tensorflow as tf
from histories import batches
from parts.next_item.turns import answer, now
from sequences import read_sequences
from settings import OF_SEQUENCES, Settings, make_model, settings_of


class Recipe:
    """See `parts.next_item.turns.Trainer`.

    Args:
      settings: ``file``, ``threads``, ``seed``, and those of the recipe's `Settings` that differ.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        file, threads, seed = (settings.pop(name) for name in ("file", "threads", "seed"))
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        random.seed(seed)  # what Keras' layers take their seeds from
        tf.random.set_seed(seed)
        self.data = read_sequences(Path(file))
        chosen = settings_of("sasrec", Settings(), settings)
        self.model = make_model("sasrec", OF_SEQUENCES, self.data.items, chosen, seed)
        self.batches = batches(self.data.train, chosen.batch, shuffle=seed)
        self.steps = len(self.batches)

    def train(self, share: float) -> list[float]:
        """Train."""
        start, steps = now(), max(1, round(share * self.steps))
        self.model.fit(self.batches, steps_per_epoch=steps, verbose=0)
        return ((now() - start) * (self.steps / steps)).tolist()

    def measure(self, cut: str) -> float:
        """Measure as the recipe does."""
        histories = getattr(self.data, cut)
        return float(self.model.evaluate(batches(histories, 1024), verbose=0, return_dict=True)["ndcg@10"])


if __name__ == "__main__":
    answer(Recipe)
