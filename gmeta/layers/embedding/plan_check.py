"""Keeps a checkpoint from being read into tables that were merged differently.

A key holds its table's number (see `gmeta.layers.embedding.merge_plan`). With other features, or the same
features in another order, the same key may belong to another feature. Rows would then be mixed up without
any sign of it. So the plan is saved with the rows and compared when they are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.merge_plan import MergedTable


class PlanCheck(tf.train.experimental.PythonState):
    """The form of a plan that `tf.train.Checkpoint` saves, and compares when it restores.

    Args:
      owner: Name of the collection, for messages.
      plan: The collection's merged tables.
    """

    def __init__(self, owner: str, plan: Sequence[MergedTable]) -> None:
        self._owner = owner
        self._plan: list[dict[str, Any]] = [
            {"dim": merged.dim, "tables": list(merged.tables)}
            # Only present if there are some, so that checkpoints from before tables could hash stay readable.
            | ({"hashed": list(merged.hashed)} if merged.hashed else {})
            for merged in plan
        ]

    def rename(self, owner: str) -> None:
        """Set the name of the collection, for messages."""
        self._owner = owner

    def serialize(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self._plan)

    def deserialize(self, string_value: str | bytes) -> None:
        """Compare this plan with a checkpoint's.

        Raises:
          ConfigError: The plans differ.
        """
        saved = json.loads(string_value)
        if saved != self._plan:
            raise ConfigError(
                f"{self._owner!r} has the tables {_show(self._plan)}, but what is loaded was saved with "
                f"{_show(saved)}: ids would be taken for those of other features. Make the collection with "
                "the features, their policies and the order that it was saved with"
            )

    def as_array(self) -> npt.NDArray[np.uint8]:
        """Return what `serialize` returns as an array, for stores that hold only numbers."""
        return np.frombuffer(self.serialize().encode(), np.uint8)

    def check_array(self, array: Any) -> None:
        """Call `deserialize` on what `as_array` returned."""
        self.deserialize(np.asarray(array).tobytes())


def _show(plan: Sequence[dict[str, Any]]) -> str:
    return "; ".join(
        f"{', '.join(merged['tables'])} ({merged['dim']} wide"
        + (f", ids of {', '.join(merged['hashed'])} hashed)" if merged.get("hashed") else ")")
        for merged in plan
    )
