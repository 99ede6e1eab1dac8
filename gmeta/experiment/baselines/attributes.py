r"""Ridge on attributes: what attributes say of an item, and what a task's own rows say of attributes.

An item's level is :math:`l_i` (`gmeta.experiment.baselines.attribute_levels`), which a new item has as well.
A task's rows lie off it by a Gaussian process over attributes with covariance K and noise
:math:`\sigma^2` (`gmeta.experiment.baselines.attribute_variances`), which its support rows S condition:

.. math:: \hat y_q = \mu + l_q + K_{qS} (K_{SS} + \sigma^2 I)^{-1} r_S, \quad
   \mathrm{var}_q = \sigma^2 + K_{qq} - K_{qS} (K_{SS} + \sigma^2 I)^{-1} K_{Sq}

This is a ridge regression of a task's residuals on attributes, whose matrix has the support's size. A task's
own attributes, such as a user's age, play no part: on MovieLens they made predictions no better. The variance
takes levels as known, and is too small for new items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gmeta.experiment.baselines.attribute_levels import ItemAttributes, Levels
from gmeta.experiment.baselines.attribute_variances import MOST_ROWS, Variances, norms
from gmeta.experiment.baselines.biases import FittedBiases
from gmeta.experiment.baselines.pseudo_cold import Fold
from gmeta.experiment.baselines.task_blocks import Block, cut_blocks, multiply
from gmeta.experiment.baselines.task_rows import Floats, Rows, Tasks


@dataclass(frozen=True)
class Attributes:
    """The baseline's settings, with the attributes that it knows.

    Attributes:
      levels: The settings of levels; the variances need none.
      known: The attributes of all items.
    """

    levels: Levels
    known: ItemAttributes

    @classmethod
    def tune(cls, folds: Sequence[Fold], known: ItemAttributes, task_damping: float) -> Attributes:
        """Choose the settings of levels on pseudo-cold tasks."""
        return cls(Levels.tune(folds, known, task_damping), known)

    def fit(self, warm: Rows) -> FittedAttributes:
        """Fit levels, then variances, to the warm rows."""
        levels = self.levels.fit(warm, self.known)
        return FittedAttributes(levels, Variances.of(warm, levels, self.known))


@dataclass(frozen=True)
class FittedAttributes:
    """Levels and variances; items have the numbers of their attributes."""

    levels: FittedBiases
    variances: Variances

    def predict(self, tasks: Tasks) -> Floats:
        """Predict the query rows, (rows,), from each task's latest `MOST_ROWS` support rows."""
        tasks = tasks.latest(MOST_ROWS)
        found = self.levels.mean + self.levels.item[tasks.query.items]
        residuals = self.levels.residuals(tasks.support)
        for block, inner, across in self._blocks(tasks):
            rest = np.where(block.given, residuals[block.support], 0)
            moved = np.matmul(across, np.linalg.solve(inner, rest[..., None]))[..., 0]
            found[block.query[block.asked]] += moved[block.asked]
        return found

    def variance(self, tasks: Tasks) -> Floats:
        """Compute the variance of the query rows' labels, (rows,), noise included."""
        tasks = tasks.latest(MOST_ROWS)
        found = self.variances.noise + norms(self.variances.vectors)[tasks.query.items]
        for block, inner, across in self._blocks(tasks):
            known = np.einsum("tqs,tsq->tq", across, np.linalg.solve(inner, across.swapaxes(1, 2)))
            found[block.query[block.asked]] -= known[block.asked]
        return found

    def _blocks(self, tasks: Tasks) -> Iterator[tuple[Block, Floats, Floats]]:
        r"""Compute :math:`K_{SS} + \sigma^2 I`, (tasks, s, s), and :math:`K_{qS}`, (tasks, q, s)."""
        for block in cut_blocks(tasks, squares=True):
            support = Block(block.support, block.given, block.support, block.given)
            inner = multiply(self.variances.vectors, tasks.support, tasks.support, support)
            across = multiply(self.variances.vectors, tasks.query, tasks.support, block)
            yield block, inner + self.variances.noise * np.eye(inner.shape[-1]), across
