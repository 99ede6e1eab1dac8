"""Gathers the vectors of a sample's ids, optionally pools them, and joins those of several tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.embedding.feature_config import Combiner, Ids, Join
from gmeta.ops import jagged
from gmeta.ops.device import on_gpu


def pool(rows: tf.Tensor, positions: Ids, combiner: Combiner | None) -> Any:
    """Gather rows and, with a combiner, reduce those of each sample.

    Args:
      rows: (unique, dim).
      positions: Indices into the rows: a Tensor, or ragged; of shape (samples, length) with a combiner.
      combiner: See `gmeta.layers.FeatureConfig`.

    Returns:
      (samples, dim) with a combiner. Without one, the positions' shape followed by (dim,), ragged if the
      positions are.
    """
    if isinstance(positions, tf.RaggedTensor):
        if combiner is None:
            return positions.with_flat_values(gather_rows(rows, positions.flat_values))
        return _pool_lists(rows, positions, _SEGMENTS[combiner])
    vectors = gather_rows(rows, positions)
    if combiner is None:
        return vectors
    total = tf.reduce_sum(vectors, axis=1)
    if combiner == "sum":
        return total
    count = tf.cast(tf.shape(positions)[1], rows.dtype)
    return tf.math.divide_no_nan(total, tf.sqrt(count) if combiner == "sqrtn" else count)


@tf.autograph.experimental.do_not_convert  # AutoGraph would drop the next decorator
@tf.custom_gradient
def gather_rows(rows: tf.Tensor, positions: tf.Tensor) -> Any:
    """Return the rows at some positions, like ``tf.gather``.

    Its gradient, `tf.IndexedSlices`, is that of ``tf.gather`` in fewer operations: the slices' values are the
    upstream gradient itself.
    """

    def gradient(upstream: tf.Tensor | tf.IndexedSlices) -> tuple[tf.IndexedSlices, None]:
        flat = positions.shape.rank == 1
        values = tf.convert_to_tensor(upstream)  # slices of slices would get the inner ones' shape
        values = values if flat else tf.reshape(values, [-1, rows.shape[-1]])
        indices = positions if flat else tf.reshape(positions, [-1])
        return tf.IndexedSlices(values, indices, tf.shape(rows)), None

    return tf.gather(rows, positions), gradient


def join_vectors(vectors: Sequence[Any], how: Join | None) -> Any:
    """Make one vector of those that the tables of a feature have for the same ids.

    Args:
      vectors: What `pool` returned for each table: (..., dim), all dense or all ragged with equal splits.
      how: See ``join`` of `gmeta.layers.FeatureConfig`; None: there is only one table.
    """
    if how is None:
        (vector,) = vectors
        return vector
    if isinstance(vectors[0], tf.RaggedTensor):
        flat = join_vectors([each.flat_values for each in vectors], how)
        return vectors[0].with_flat_values(flat)
    return tf.add_n(vectors) if how == "sum" else tf.concat(vectors, axis=-1)


def _pool_lists(rows: tf.Tensor, positions: tf.RaggedTensor, reduce: Any) -> tf.Tensor:
    """Pool in one pass over the rows. A separate gather would write a vector for each id and reread it."""
    ids, segments = positions.flat_values, jagged.row_ids(jagged.from_ragged(positions))
    if on_gpu():  # its kernels refuse an empty reduction over a tensor without rows
        rows = tf.cond(tf.shape(rows)[0] > 0, lambda: rows, lambda: tf.zeros([1, rows.shape[1]], rows.dtype))
    # Without any id, TensorFlow leaves the gradient's memory uninitialised. So append a sample that reads
    # row 0 and cut it off again: it gives the row a gradient of 0.
    shapes = tf.shape(ids, tf.int64), tf.shape(rows, tf.int64)
    with tf.device("CPU:0"):  # where sizes are read
        lonely = tf.cast((shapes[0][0] == 0) & (shapes[1][0] > 0), tf.int64)
        samples = tf.size(positions.row_splits, tf.int64) - 1
        count = samples + lonely
    ids = tf.concat([ids, tf.zeros([lonely], ids.dtype)], 0)
    segments = tf.concat([segments, tf.fill([lonely], samples)], 0)
    return reduce(rows, ids, segments, num_segments=count)[:samples]


_SEGMENTS = {
    "sum": tf.sparse.segment_sum,
    "mean": tf.sparse.segment_mean,
    "sqrtn": tf.sparse.segment_sqrt_n,
}


def _differentiable_twice(gradient_op: str, reduce: Any) -> None:
    """Let TensorFlow differentiate a segment reduction twice, as second-order adaptation of rows does.

    The reduction is linear in its rows, so the gradient of its gradient is the reduction itself.
    """

    def gradient(op: tf.Operation, upstream: tf.Tensor) -> tuple[tf.Tensor, None, None, None]:
        _, indices, segments, _ = op.inputs
        samples = tf.shape(op.inputs[0])[0]
        return reduce(upstream, indices, segments, num_segments=samples), None, None, None

    with suppress(KeyError):  # this TensorFlow already has the gradient
        tf.RegisterGradient(gradient_op)(gradient)


for _pooling, _op in (("sum", "Sum"), ("mean", "Mean"), ("sqrtn", "SqrtN")):
    _differentiable_twice(f"SparseSegment{_op}Grad", _SEGMENTS[_pooling])


# A layer that makes the vector of an item or a user from its own row and the rows of its attributes.


@tf.keras.saving.register_keras_serializable("gmeta")
class EntityVector(tf.keras.layers.Layer):
    r"""The vector of an entity: its own row plus its attributes' vectors.

    .. math:: v = m\, e_{own} + \sum_{a} e_a, \quad
       m \sim \mathrm{Bernoulli}(1 - p) \text{ in training, else } 1

    An entity with many samples has a trained row of its own. A new entity has none yet, so its attributes
    alone must describe it: training drops own rows at random, and attributes learn to predict alone. Unlike
    ``tf.keras.layers.Dropout``, the rows that stay aren't scaled up: they add what they will add in serving.
    Start own rows at or near 0 (``Normal(0.0, 0.01)``), so that an entity which was never trained adds
    nothing, and pool lists of attributes by ``"sqrtn"``, so that a sum of n rows varies as much as one.

    Args:
      own: The feature of the entity's id; None: it has only attributes.
      attributes: The features of its attributes; all features have one width.
      dropout: p, the probability that training leaves out a sample's own row, in [0, 1).
      seed: The seed of what is dropped.

    Shapes:
      {feature: (..., samples, width)} -> (..., samples, width).

    Raises:
      ConfigError: Nothing is named, a feature is named twice, or the probability isn't in [0, 1).

    Example:
      >>> layer = EntityVector("film", ["genre", "director"], dropout=0.2)
      >>> vectors = {"film": tf.ones([2, 3]), "genre": tf.ones([2, 3]), "director": tf.ones([2, 3])}
      >>> layer(vectors).numpy().tolist()
      [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    """

    def __init__(
        self,
        own: str | None,
        attributes: Sequence[str] = (),
        *,
        dropout: float = 0.2,
        seed: int = 0,
        name: str = "entity_vector",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.names = [*([] if own is None else [own]), *attributes]
        if not self.names or len(set(self.names)) != len(self.names):
            raise ConfigError(f"{name}: own and attributes must name features, each once, got {self.names}")
        if isinstance(dropout, bool) or not 0.0 <= dropout < 1.0:
            raise ConfigError(f"{name}: dropout must lie in [0, 1), got {dropout!r}")
        self.own, self.attributes, self.seed = own, tuple(attributes), seed
        self.drop = tf.keras.layers.Dropout(dropout, seed=seed)

    def call(self, vectors: Mapping[str, tf.Tensor], training: bool | None = None) -> tf.Tensor:
        """Add up the vectors.

        Args:
          vectors: The features' vectors, as `EmbeddingCollection` gives them; others are left out.
          training: Whether to drop own rows.
        """
        missing = [name for name in self.names if name not in vectors]
        if missing:
            raise ConfigError(
                f"{self.name}: no vectors of {', '.join(missing)}; there are {', '.join(vectors)}"
            )
        parts = [vectors[name] for name in self.attributes]
        if self.own is not None:
            own = vectors[self.own]
            kept = self.drop(tf.ones_like(own[..., :1]), training=training)
            parts.append(own * tf.sign(kept))
        return tf.add_n(parts)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        own = {"own": self.own, "attributes": list(self.attributes)}
        return {**super().get_config(), **own, "dropout": self.drop.rate, "seed": self.seed}
