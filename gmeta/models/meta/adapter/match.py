"""Checks that fast weights belong to a model's network and to its present shared weights."""

from __future__ import annotations

from typing import Any

from gmeta.core.errors import ConfigError, NotFiniteError
from gmeta.models.meta.adapter.fast_weights import FastWeights
from gmeta.models.meta.learner.task_learner import TaskLearner
from gmeta.models.meta.learner.task_view import row_names


def check_network(weights: Any, learner: TaskLearner) -> None:
    """Refuse weights that aren't fast weights of a model's network, or that aren't finite.

    Raises:
      ConfigError: They aren't of the network; the message says which weights differ.
      NotFiniteError: A delta is NaN or infinite.
    """
    if not isinstance(weights, FastWeights):
        raise ConfigError(f"weights must be what model.adapt gave, got {type(weights).__name__}")
    here = {name: tuple(variable.shape) for name, variable in learner.network.task_weights().items()}
    tables = zip(row_names(learner.collection), learner.collection.merged, strict=True)
    dims = {name: merged.dim for name, merged in tables}
    wrong = [f"it lacks {name}" for name in learner.adapted_weights() if name not in weights.deltas]
    for name, delta in weights.deltas.items():
        if delta.shape != here.get(name):
            wrong.append(f"{name} of shape {delta.shape}, here {here.get(name, 'no such weight')}")
    for name, rows in weights.rows.items():
        if rows.deltas.shape[1] != dims.get(name):
            wrong.append(f"{name} of width {rows.deltas.shape[1]}, here {dims.get(name, 'no such table')}")
    if wrong:
        raise ConfigError(
            f"fast weights of another network ({weights.model!r}, {weights.algorithm}): {'; '.join(wrong)}. "
            "Adapt the task again with this model"
        )
    if bad := weights.not_finite():
        raise NotFiniteError(f"fast weights: {bad} holds NaN or infinity: adapt the task again")


def check_fingerprint(weights: FastWeights, here: str) -> None:
    """Refuse deltas from shared weights with another fingerprint.

    Raises:
      ConfigError: The fingerprints differ.
    """
    if weights.fingerprint != here:
        raise ConfigError(
            f"the fast weights are deltas from other shared weights ({weights.fingerprint}, and the model's "
            f"are {here}): it was trained, or loaded, since, or its tables start otherwise. Adapt the task "
            "again; or, to add these deltas to the present weights, pass weights=fast.rebase(model)"
        )
