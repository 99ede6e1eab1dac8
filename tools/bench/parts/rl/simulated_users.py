"""Simulated users, in batches: their histories and exposures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gmeta.core.semantic_ids import SemanticIds
from gmeta.preprocess import cooccurrence_vectors, semantic_ids
from gmeta.preprocess.synthetic.exposures import ExposureConfig
from gmeta.preprocess.synthetic.user_law import SimulatorConfig
from gmeta.preprocess.synthetic.user_simulator import UserHistories, UserSimulator

import numpy as np
import tensorflow as tf


@dataclass(frozen=True)
class SimulatedUsers:
    """Users for training, and others for evaluation.

    Attributes:
      seed: The seed of the simulation.
      items: The number of items in the catalogue.
      users: The number of users for training; an eighth as many more are for evaluation.
      events: The number of events of each user.
      pages: The pages of 10 items shown to each user.
      batch: The number of users per step.
    """

    seed: int
    items: int
    users: int
    events: int
    pages: int
    batch: int

    @cached_property
    def simulator(self) -> UserSimulator:
        """The world."""
        return UserSimulator(SimulatorConfig(ExposureConfig(seed=self.seed, items=self.items)))

    @cached_property
    def past(self) -> UserHistories:
        """The histories of the users for training."""
        return self.simulator.histories(np.arange(self.users), self.events, self.pages)

    @cached_property
    def new(self) -> UserHistories:
        """The histories of the users for evaluation."""
        return self.simulator.histories(self.users + np.arange(self.users // 8), self.events, self.pages)

    @cached_property
    def ids(self) -> SemanticIds:
        """Codes of the items, from their neighbours in the histories."""
        vectors = cooccurrence_vectors(list(self.past.items), items=self.items, dim=32, seed=self.seed)
        return semantic_ids(vectors, levels=2, codes=32, balanced=True, seed=self.seed)

    def histories(self, of: UserHistories, *, shuffle: int | None = None) -> tf.data.Dataset:
        """Return batches of ``user`` and of events' columns, shuffled if a seed is given."""
        return self._batches({"user": of.states.users, **self._events(of)}, shuffle)

    def exposures(self, of: UserHistories, *, shuffle: int | None = None) -> tf.data.Dataset:
        """Return batches of users with all their exposures, as `gmeta.models.GRM` takes them."""
        n, pages, page = of.shown.shape
        category = self.simulator.world.category
        shown = of.shown.reshape(n, -1)
        parts = {
            "task": of.states.users,
            "contexts": {},
            "history": self._events(of),
            "targets": {
                "item": _ragged(shown),
                "category": _ragged(category[shown]),
                "time": _ragged(np.repeat(of.shown_times, page, axis=1)),
            },
            "labels": {"click": _ragged(of.clicks.reshape(n, pages * page).astype(np.float32))},
        }
        return self._batches(parts, shuffle)

    def _batches(self, parts: Any, shuffle: int | None) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(parts)
        if shuffle is not None:
            data = data.shuffle(self.users, seed=shuffle)
        return data.batch(self.batch)

    def _events(self, of: UserHistories) -> dict[str, tf.RaggedTensor]:
        columns = {"item": of.items, "category": self.simulator.world.category[of.items]}
        columns |= {"action": of.actions, "time": of.times}
        return {name: _ragged(column) for name, column in columns.items()}


def _ragged(rows: np.ndarray) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_tensor(rows)
