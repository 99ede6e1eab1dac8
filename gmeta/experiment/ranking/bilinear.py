"""The form that baselines of users and items share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gmeta.experiment.baselines.task_rows import Floats, Ints
from gmeta.experiment.measurement.split import as_logits
from gmeta.experiment.ranking.examples import Examples

LEAST = 0.01
"""The least probability that a bilinear form predicts."""


@dataclass(frozen=True)
class Bilinear:
    r"""The common form of many baselines: :math:`\mu + b_i + x_i^T u`, for item i and the vector u of a user.

    Attributes:
      user: The feature of users; None: there is none.
      item: The feature of items; None: there is none.
      mean: :math:`\mu`.
      bias: (items + 1,); the first is for unknown items.
      vectors: (items + 1, width).
      users: (users + 1, width); the first is for unknown users.
      binary: Whether the form is a probability, which `scores` converts to a logit.
    """

    user: str | None
    item: str | None
    mean: float
    bias: Floats
    vectors: Floats
    users: Floats
    binary: bool

    def values(self, asked: Examples) -> Floats:
        """Compute the form, (rows,)."""
        item, user = (numbers_of(asked, name) for name in (self.item, self.user))
        moved = np.einsum("rk,rk->r", self.vectors[item], self.users[user])
        return np.asarray(self.mean + self.bias[item] + moved)

    def scores(self, asked: Examples) -> Floats:
        """Compute the form, or its logit, (rows,)."""
        found = self.values(asked)
        return as_logits(found, LEAST) if self.binary else found


def numbers_of(asked: Examples, name: str | None) -> Ints:
    """Return the numbers of a feature's ids, (rows,); all 0 without a feature."""
    return np.zeros(len(asked), np.int64) if name is None else np.asarray(asked.ids[name])
