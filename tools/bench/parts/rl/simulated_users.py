"""Simulated users, in batches: their histories, and what they were shown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tensorflow as tf
from gmeta.preprocess import (
    ExposureConfig,
    SemanticIds,
    SimulatorConfig,
    UserHistories,
    UserSimulator,
    cooccurrence_vectors,
    semantic_ids,
)


@dataclass(frozen=True)
class SimulatedUsers:
    """Users to train on, and others to measure on.

    Attributes:
      seed: Of the world.
      items: Of the catalogue.
      users: To train on; a quarter as many more are measured on.
      events: Of each user.
      pages: That each is shown, of 10 items.
      batch: Users a step.
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
        """The histories of the users to train on."""
        return self.simulator.histories(np.arange(self.users), self.events, self.pages)

    @cached_property
    def new(self) -> UserHistories:
        """The histories of the users to measure on."""
        return self.simulator.histories(self.users + np.arange(self.users // 4), self.events, self.pages)

    @cached_property
    def ids(self) -> SemanticIds:
        """Codes of the items, by what stands near them in the histories."""
        vectors = cooccurrence_vectors(list(self.past.items), items=self.items, dim=32, seed=self.seed)
        return semantic_ids(vectors, levels=2, codes=32, balanced=True, seed=self.seed)

    def histories(self, of: UserHistories, *, shuffle: int | None = None) -> tf.data.Dataset:
        """Return batches of ``user``, ``item``, ``action`` and ``time``; shuffled, if a seed is given."""
        columns = {name: _ragged(getattr(of, name + "s")) for name in ("item", "action", "time")}
        data = tf.data.Dataset.from_tensor_slices({"user": of.states.users, **columns})
        if shuffle is not None:
            data = data.shuffle(len(of.states), seed=shuffle)
        return data.batch(self.batch)

    def exposures(self, of: UserHistories) -> tf.data.Dataset:
        """Return batches of users with all that they were shown, as `gmeta.models.GRM` takes them."""
        n, pages, page = of.shown.shape
        category = self.simulator.world.category
        shown = of.shown.reshape(n, -1)
        parts = {
            "task": of.states.users,
            "contexts": {"user": of.states.users},
            "history": {name: _ragged(getattr(of, name + "s")) for name in ("item", "action", "time")},
            "targets": {
                "item": _ragged(shown),
                "category": _ragged(category[shown]),
                "time": _ragged(np.repeat(of.shown_times, page, axis=1)),
            },
            "labels": {"click": _ragged(of.clicks.reshape(n, pages * page).astype(np.float32))},
        }
        return tf.data.Dataset.from_tensor_slices(parts).batch(self.batch)


def _ragged(rows: np.ndarray) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_tensor(rows)
