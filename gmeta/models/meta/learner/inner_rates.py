"""Inner learning rates that the outer loop learns."""

from __future__ import annotations

import re
from collections.abc import Mapping

import tensorflow as tf

from gmeta.layers import EmbeddingCollection
from gmeta.meta import InnerLoop
from gmeta.models.meta.learner.task_view import row_names


class InnerRates(tf.keras.layers.Layer):
    """Inner rates of layers, or of each adapted number (Meta-SGD, Li et al., 2017, section 3).

    The rates start at the inner loop's rate and may take any value, negative ones too. All rows of a table
    share one rate, or one rate for each column; a row that was never seen has the same rates.

    Args:
      inner: The inner loop.
      weights: The weights of the network that adapt, by name.
      collection: The collection with the tables, used if rows adapt.
    """

    def __init__(
        self, inner: InnerLoop, weights: Mapping[str, tf.Variable], collection: EmbeddingCollection
    ) -> None:
        super().__init__(name="inner_rates")
        kind = inner.learn_learning_rate
        self._learned = kind is not None
        start = tf.keras.initializers.Constant(inner.learning_rate)
        self._rates: dict[str, tf.Variable] = {}
        self._rate_of: dict[str, str] = {}
        if kind is None:
            return
        shapes = {name: list(variable.shape) for name, variable in weights.items()}
        if inner.adapts_embeddings:
            of_tables = zip(row_names(collection), collection.merged, strict=True)
            shapes |= {name: [merged.dim] for name, merged in of_tables}
        for name, shape in shapes.items():
            key = name if kind == "parameter" or name not in weights else name.rpartition("/")[0]
            self._rate_of[name] = key
            if key not in self._rates:
                self._rates[key] = self.add_weight(
                    name=_exportable(f"rate/{key}"),
                    shape=shape if kind == "parameter" else [],
                    initializer=start,
                )

    def values(self) -> dict[str, tf.Tensor] | None:
        """Return the name of each adapted weight or table -> its rate; None if no rate is learned."""
        if not self._learned:
            return None
        return {name: tf.convert_to_tensor(self._rates[key]) for name, key in self._rate_of.items()}


def _exportable(name: str) -> str:
    """Return a name that a SavedModel can hold, such as ``user.item`` for the table ``user+item``."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", ".", name)
