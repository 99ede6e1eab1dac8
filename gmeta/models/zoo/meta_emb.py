"""MetaEmb: a generator of embeddings for new ids, trained so that they predict well and adapt well.

Pan et al., "Warm Up Cold-start Advertisements: Improving CTR Predictions via Learning to Learn ID
Embeddings" (SIGIR 2019), section 3 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.layers import EmbeddingCollection
from gmeta.models.meta.meta_model import MetaModel
from gmeta.models.meta.task_learner import OuterLoss, TaskLearner
from gmeta.models.meta.task_losses import check_inner
from gmeta.models.meta.task_view import TaskView, given_network, inputs_by_name
from gmeta.models.zoo.cbml_model import aspect_columns

# A network that takes one feature's row as a weight, with one row per task.

GENERATED = "generated/row"
"""The name of the row among the adapted weights."""


class RowNetwork(tf.keras.layers.Layer):
    """A frozen network that reads one vector of a feature for all samples of a task.

    The vector is the only weight that a task may adapt, so `gmeta.models.MetaModel` treats it like any other
    weight. It is 0 if none is passed.

    Args:
      network: The network; see `gmeta.models.meta.task_view.AdaptiveNetwork`.
      widths: The features' names and widths, in the order of their vectors.
      feature: The feature whose vectors are replaced.
      by_name: Whether the network takes {feature: vectors}.

    Shapes:
      (tasks, samples, sum of widths) -> (tasks, samples, outputs).
    """

    def __init__(self, network: Any, widths: Sequence[tuple[str, int]], feature: str, by_name: bool) -> None:
        super().__init__(name=f"{network.name}_of_rows", dtype=tf.keras.backend.floatx())
        self.network, self._widths, self._feature, self._by_name = network, tuple(widths), feature, by_name
        self.row = self.add_weight("row", [dict(widths)[feature]], initializer="zeros", trainable=False)

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return only the row."""
        return {GENERATED: self.row}

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return only the row."""
        return self.task_weights()

    def call(
        self, x: tf.Tensor, weights: Mapping[str, tf.Tensor] | None = None, training: bool | None = None
    ) -> tf.Tensor:
        """Run the network.

        Args:
          x: (tasks, samples, sum of widths): all features' vectors side by side.
          weights: The row, (dim,) for all tasks or (tasks, dim).
          training: Has no effect: the network is trained already.
        """
        row = tf.cast((weights or {}).get(GENERATED, self.row), x.dtype)
        vectors = {
            name: tf.gather(x, aspect_columns(self._widths, [name]), axis=-1) for name, _ in self._widths
        }
        own = row[:, tf.newaxis] if row.shape.rank == 2 else row
        vectors[self._feature] = tf.broadcast_to(own, tf.shape(vectors[self._feature]))
        if self._by_name:
            return self.network(vectors, training=False)
        return self.network(tf.concat(list(vectors.values()), axis=-1), training=False)


# Tasks that start from generated rows: the learner of `MetaEmb`.


class GeneratedRowLearner(TaskLearner):
    """A `TaskLearner` whose tasks adapt one generated row each; `MetaEmb` has the equations.

    Args:
      collection: The base's embeddings.
      network: The base's network, wrapped so that it takes the row.
      inner: The inner loop.
      widths: (feature, dim) for all features.
      attributes: The features that rows are generated from.
      generator: As for `MetaEmb`.
      cold_weight: As for `MetaEmb`.
      **options: As for `TaskLearner`.

    Raises:
      ConfigError: The inner loop adapts something other than the row.
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        network: RowNetwork,
        inner: meta.InnerLoop | None = None,
        *,
        widths: Sequence[tuple[str, int]],
        attributes: Sequence[str],
        generator: Any,
        cold_weight: float,
        **options: Any,
    ) -> None:
        super().__init__(collection, network, inner, **options)
        self.attributes, self.generator = list(attributes), generator
        self._widths, self._cold_weight = list(widths), cold_weight
        generator(tf.zeros([1, sum(dim for name, dim in widths if name in attributes)]))

    def _adapt_by(self, inner: meta.InnerLoop) -> None:
        """Adapt by another inner loop from now on.

        Raises:
          ConfigError: The inner loop adapts something other than the row.
        """
        check_inner(inner)
        if inner.algorithm not in ("maml", "fomaml", "meta-sgd") or inner.adapt:
            raise ConfigError(
                "MetaEmb: a task adapts its generated row alone, by maml, fomaml or meta-sgd: leave adapt "
                f"out of {inner}"
            )
        super()._adapt_by(inner)

    @property
    def layers(self) -> list[tf.keras.layers.Layer]:
        """The layers that hold the shared weights, in a fixed order."""
        return [*super().layers, self.generator]

    def generate(self, features: Mapping[str, Any]) -> tf.Tensor:
        """Generate rows for ids from their attributes.

        Args:
          features: Attribute -> its ids for n items, as in a batch of samples.

        Returns:
          (n, dim).
        """
        first = features[self.attributes[0]]
        samples = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]
        nothing = tf.zeros([samples], tf.int64)
        ids = {name: features[name] if name in self.attributes else nothing for name, _ in self._widths}
        vectors = self.collection.embed(self.collection.lookup(ids, insert=False))
        return self.generator(tf.concat([vectors[name] for name in self.attributes], axis=-1))

    def start_weights(self, view: TaskView) -> dict[str, tf.Tensor]:
        """Generate the tasks' rows, (tasks, dim)."""
        first = tf.argmax(tf.cast(view.mask("all") > 0, tf.int32), axis=1)
        vectors = tf.gather(view.inputs("all"), first, axis=1, batch_dims=1)
        columns = [column for name in self.attributes for column in aspect_columns(self._widths, [name])]
        return {GENERATED: self.generator(tf.gather(vectors, columns, axis=-1))}

    def outer_loss(self, view: TaskView, weights: Mapping[str, tf.Tensor]) -> OuterLoss:
        """Compute the mean over tasks of the weighted sum of cold support loss and warm query loss."""
        warm = self.task_outputs(view, "query", weights)
        mask = view.mask("query")
        losses = self._cold_weight * self.support_loss(view, self.start_weights(view)) + (
            1 - self._cold_weight
        ) * self.mean_losses(view, "query", warm)
        real = tf.cast(tf.reduce_any(mask > 0, axis=1), losses.dtype)
        loss = tf.math.divide_no_nan(tf.reduce_sum(losses * real), tf.reduce_sum(real))
        return OuterLoss(loss, "query", warm)


@tf.keras.saving.register_keras_serializable("gmeta")
class MetaEmb(MetaModel):
    r"""A trained model, with a generator in place of one feature's embedding rows.

    A task is an item: all its samples have one id, and the attributes u of that id. Support and query are the
    paper's two minibatches of the item. Only the generator g is trained. It makes the id's row. The base
    model f predicts with the row as generated (cold), and after the inner steps (warm), which change only
    this row:

    .. math:: \phi_t = g(u_t) = \gamma \tanh(W u_t), \quad
       \phi_t' = \phi_t - a \nabla_{\phi_t} \ell(f(S_t; \phi_t)), \quad
       L = \frac{1}{T} \sum_t \alpha\, \ell(f(S_t; \phi_t)) + (1 - \alpha)\, \ell(f(Q_t; \phi_t'))

    with :math:`\ell` the mean loss over a task's samples. As in the paper, u are the base's own embeddings of
    the attributes, frozen with the rest of the base. In contrast to the paper, any number of inner steps and
    any inner optimizer may be used, ``order=1`` leaves out the second derivatives, and support and query may
    differ in size.

    Metrics, ``evaluate`` and ``predict`` use warm predictions of the query samples;
    ``predict_after(batch, [0, 1])`` returns cold predictions too. `generate` makes rows for new ids, and
    ``model.adapt`` warms one up and returns the row.

    Args:
      base: A trained model; `MetaModel` with ``InnerLoop(steps=0)`` and ``outer_samples="all"`` gives
        ordinary training. Its embeddings and network are used unchanged, and frozen from here on.
      feature: The feature whose rows are generated, such as ``"ad"``; one id per sample.
      attributes: The features that rows are generated from; None: all others. A task's attributes are read
        from its first sample.
      cold_weight: :math:`\alpha`, from 0 to 1; the paper uses 0.1.
      generator: Any Keras layer or model that maps the attributes' vectors, (tasks, width), to rows,
        (tasks, dim of the feature), in place of the generator above.
      scale: :math:`\gamma`, the largest absolute value of a generated number; choose about the size of
        numbers in trained rows.
      inner: The inner loop: its steps, rate a, order and optimizer. The algorithm is ``"maml"``,
        ``"fomaml"``, or ``"meta-sgd"`` to learn a.
      seed: The seed of the generator's initial weights.
      name: The model's name.

    Raises:
      ConfigError: The base isn't a `MetaModel`; the feature is unknown or has several ids per sample; there
        are no attributes; the weight is outside of 0 to 1; or the inner loop adapts something other than the
        row.

    Example:
      >>> from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
      >>> features = [FeatureConfig(name, dim=8) for name in ("ad", "category", "user")]
      >>> base = MetaModel(
      ...     EmbeddingCollection(features),
      ...     MLP({"fc": 16, "out": 1}),
      ...     inner=meta.InnerLoop(steps=0),
      ...     outer_samples="all",
      ... )
      >>> model = MetaEmb(base, "ad", attributes=["category"], inner=meta.InnerLoop(learning_rate=0.1))
      >>> model.compile("adam", tf.keras.losses.BinaryCrossentropy(from_logits=True))
      >>> model.generate({"category": tf.constant([3, 5])}).shape
      TensorShape([2, 8])
    """

    learner: GeneratedRowLearner

    def __init__(
        self,
        base: MetaModel,
        feature: str,
        *,
        attributes: Sequence[str] | None = None,
        cold_weight: float = 0.1,
        generator: Any = None,
        scale: float = 0.2,
        inner: meta.InnerLoop | None = None,
        seed: int = 0,
        name: str = "meta_emb",
    ) -> None:
        if not isinstance(base, MetaModel):
            raise ConfigError(f"MetaEmb: base must be a trained MetaModel, got {type(base).__name__}")
        widths = {each.name: each.width for each in base.collection.in_order("MetaEmb")}
        self._check(widths, feature, attributes, cold_weight)
        if any(each.name == feature and each.combiner is not None for each in base.collection.features):
            raise ConfigError(
                f"MetaEmb: {feature!r} has several ids per sample, and a task is the samples of one id: name "
                "the feature that identifies tasks"
            )
        named = inputs_by_name(given_network(base.network), base.collection)
        if set(named or widths) != set(widths):
            raise ConfigError(
                f"MetaEmb: the network must take the vectors of all features, {', '.join(widths)}, and "
                f"nothing else, but takes {', '.join(named or ())}"
            )
        chosen = [each for each in widths if each != feature and each in (attributes or widths)]
        learner = partial(
            GeneratedRowLearner,
            widths=list(widths.items()),
            attributes=chosen,
            generator=generator or _generator(widths[feature], scale, seed),
            cold_weight=cold_weight,
        )
        network = RowNetwork(base.network, list(widths.items()), feature, by_name=named is not None)
        super().__init__(base.collection, network, inner=inner, reduction="task", learner=learner, name=name)
        base.collection.trainable = base.network.trainable = self.network.trainable = False
        self.feature, self.attributes, self.cold_weight = feature, chosen, cold_weight
        self.generator = self.learner.generator

    @staticmethod
    def _check(
        widths: Mapping[str, int], feature: str, attributes: Sequence[str] | None, cold_weight: float
    ) -> None:
        strange = sorted({feature, *(attributes or ())} - set(widths))
        if strange:
            raise ConfigError(f"MetaEmb: the model has no {', '.join(strange)}, but {', '.join(widths)}")
        if len(widths) < 2 or (attributes is not None and not set(attributes) - {feature}):
            raise ConfigError(
                f"MetaEmb: rows of {feature!r} must be generated from other features: name some"
            )
        if not 0 <= cold_weight <= 1:
            raise ConfigError(f"MetaEmb: cold_weight must be from 0 to 1, got {cold_weight}")

    def generate(self, features: Mapping[str, Any]) -> tf.Tensor:
        """Generate rows for ids from their attributes.

        Args:
          features: Attribute -> its ids for n items, as in a batch of samples.

        Returns:
          (n, dim).
        """
        return self.learner.generate(features)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        serialize = tf.keras.saving.serialize_keras_object
        return {
            "collection": serialize(self.collection),
            "network": serialize(given_network(self.network.network)),
            "inner": to_mapping(self.inner),
            "name": self.name,
            "feature": self.feature,
            "attributes": self.attributes,
            "cold_weight": self.cold_weight,
            "generator": serialize(self.generator),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MetaEmb:
        """Create the model that a config from `get_config` describes."""
        made = {
            part: tf.keras.saving.deserialize_keras_object(config[part], custom_objects)
            for part in ("collection", "network", "generator")
        }
        rest = {name: value for name, value in config.items() if name not in (*made, "inner")}
        inner = from_mapping(meta.InnerLoop, config["inner"], "inner")
        base = MetaModel(made["collection"], made["network"])
        return cls(base, generator=made["generator"], inner=inner, **rest)


def _generator(width: int, scale: float, seed: int) -> tf.keras.Model:
    """Make the paper's generator."""
    start = tf.keras.initializers.GlorotUniform(seed=seed)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(width, "tanh", use_bias=False, kernel_initializer=start),
            tf.keras.layers.Rescaling(scale),
        ],
        name="generator",
    )
