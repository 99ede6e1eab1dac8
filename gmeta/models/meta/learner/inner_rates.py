"""Inner learning rates that the outer loop learns."""

from __future__ import annotations

import re
from collections.abc import Mapping

import tensorflow as tf

from gmeta.layers import EmbeddingCollection
from gmeta.meta import InnerLoop
from gmeta.models.meta.learner.task_view import row_names


class InnerRates(tf.keras.layers.Layer):
    """A rate for each layer, or for each number of what adapts (Meta-SGD, Li et al., 2017, section 3).

    They start at the inner loop's rate and may become anything, negative too: what helps is learned. Rows of
    a table have one rate, or one for each column, which a row that was never seen has as well.

    Args:
      inner: The inner loop.
      weights: What adapts of the network, by name.
      collection: The tables, for when rows adapt.
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
        """Name -> the rate of what adapts under that name; None where no rate is learned."""
        if not self._learned:
            return None
        return {name: tf.convert_to_tensor(self._rates[key]) for name, key in self._rate_of.items()}


def _exportable(name: str) -> str:
    """A name that a SavedModel can hold, such as ``user.item`` of the table ``user+item``."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", ".", name)
