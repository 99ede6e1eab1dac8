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

from gmeta.core.data.merged_keys import MOST_HASHED, MergedKeys
from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.merge_plan import MergedTable
from gmeta.ops.table.hash_table import HashTable


class PlanCheck(tf.train.experimental.PythonState):
    """The form of a plan that `tf.train.Checkpoint` saves, and compares when it restores.

    Args:
      owner: Name of the collection, for messages.
      plan: The collection's merged tables.
      tables: The physical tables, one for each of these.
    """

    def __init__(self, owner: str, plan: Sequence[MergedTable], tables: Sequence[HashTable]) -> None:
        self._owner, self._merged, self._tables = owner, plan, tables

    @property
    def _plan(self) -> list[dict[str, Any]]:
        return [
            {"dim": merged.dim, **merged.keys(table.fold).to_json()}
            for merged, table in zip(self._merged, self._tables, strict=True)
        ]

    def rename(self, owner: str) -> None:
        """Set the name of the collection, for messages."""
        self._owner = owner

    def serialize(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(self._plan)

    def deserialize(self, string_value: str | bytes) -> None:
        """Compare this plan with a checkpoint's, and take over its fold of hashed ids.

        Raises:
          ConfigError: The plans differ, or this gmeta doesn't know the fold.
        """
        saved = json.loads(string_value)
        keys = [MergedKeys.from_json(merged) for merged in saved]
        own = [(merged.dim, merged.tables, merged.hashed) for merged in self._merged]
        if [(each["dim"], of.tables, of.hashed) for each, of in zip(saved, keys, strict=True)] != own:
            raise ConfigError(
                f"{self._owner!r} has the tables {_show(self._plan)}, but what is loaded was saved with "
                f"{_show(saved)}: ids would be taken for those of other features. Make the collection with "
                f"the features, their policies and the order that it was saved with{_fold_advice(keys)}"
            )
        for table, merged in zip(self._tables, keys, strict=True):
            table.follow_fold(merged)

    def as_array(self) -> npt.NDArray[np.uint8]:
        """Return what `serialize` returns as an array, for stores that hold only numbers."""
        return np.frombuffer(self.serialize().encode(), np.uint8)

    def check_array(self, array: Any) -> None:
        """Call `deserialize` on what `as_array` returned."""
        self.deserialize(np.asarray(array).tobytes())


def _fold_advice(saved: Sequence[MergedKeys]) -> str:
    """Return what makes a collection whose tables are merged as the earlier fold allowed."""
    larger = any(keys.hashed and len(keys.tables) > MOST_HASHED for keys in saved)
    return ", and fold='xor'" if larger else ""


def _show(plan: Sequence[dict[str, Any]]) -> str:
    return "; ".join(
        f"{', '.join(merged['tables'])} ({merged['dim']} wide"
        + (f", ids of {', '.join(merged['hashed'])} hashed)" if merged.get("hashed") else ")")
        for merged in plan
    )
