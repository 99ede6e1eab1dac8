r"""DCN-v2: explicit crosses of features beside, or before, a multilayer perceptron.

From Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank
Systems" (2021), sections 3.2 to 3.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.layers import EmbeddingCollection
from gmeta.layers.networks import dense
from gmeta.training.model import Model

Structure = Literal["parallel", "stacked"]
_HEADS = ("ctr", "rating")


@tf.keras.saving.register_keras_serializable("gmeta")
class CrossLayers(tf.keras.layers.Layer):
    r"""Crosses of a sample's input with itself, one degree more with each layer.

    Equation (2) of the paper, where :math:`\odot` multiplies element by element:

    .. math:: x_{l+1} = x_0 \odot (W_l x_l + b_l) + x_l

    With a rank r below the input's width d, :math:`W_l = U_l V_l^T`, equation (3), with U and V of (d, r).

    Args:
      layers: The number of layers; the last one's output has crosses of degree ``layers + 1``.
      rank: r; None: full matrices.
      seed: The seed of the initial weights.

    Shapes:
      (..., d) -> (..., d).

    Example:
      >>> CrossLayers(2)(tf.ones([5, 3])).shape
      TensorShape([5, 3])
    """

    def __init__(
        self, layers: int = 2, *, rank: int | None = None, seed: int = 0, name: str = "cross", **kwargs: Any
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.layers = whole_number(f"{name}: layers", layers, least=1)
        self.rank = None if rank is None else whole_number(f"{name}: rank", rank, least=1)
        self.seed = seed

    def build(self, shape: Any) -> None:
        """Make the weights for inputs of a width."""
        width = int(shape[-1])
        low = self.rank is not None and self.rank < width
        factors = [(width, self.rank), (self.rank, width)] if low else [(width, width)]
        self.kernels = [
            [
                self.add_weight(
                    f"{number}/kernel{place if low else ''}",
                    size,
                    initializer=tf.keras.initializers.GlorotNormal(1000 * self.seed + 2 * number + place),
                )
                for place, size in enumerate(factors)
            ]
            for number in range(self.layers)
        ]
        self.biases = [
            self.add_weight(f"{number}/bias", [width], initializer="zeros") for number in range(self.layers)
        ]
        super().build(shape)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Compute the last layer's output."""
        first = x
        for kernels, bias in zip(self.kernels, self.biases, strict=True):
            turned = x
            for kernel in kernels:
                turned = tf.tensordot(turned, kernel, 1)
            x = first * (turned + bias) + x
        return x

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "layers": self.layers, "rank": self.rank, "seed": self.seed}


@tf.keras.saving.register_keras_serializable("gmeta")
class DCNNetwork(tf.keras.layers.Layer):
    """The network of `DCN` after the embeddings.

    Args:
      features: The names of the features.
      floats: As for `DCN`; so are the other arguments.

    Shapes:
      {feature: (samples, width), column: (samples,)} -> (samples, outputs).

    Example:
      >>> network = DCNNetwork(["user", "item"], floats=["price"])
      >>> network({"user": tf.zeros([3, 4]), "item": tf.zeros([3, 8]), "price": tf.zeros([3])}).shape
      TensorShape([3, 1])
    """

    def __init__(
        self,
        features: Sequence[str],
        *,
        floats: Sequence[str] = (),
        cross: int = 2,
        rank: int | None = None,
        hidden: Sequence[int] = (64, 32),
        structure: Structure = "parallel",
        dropout: float = 0.0,
        head: Literal["ctr", "rating"] = "ctr",
        outputs: int = 1,
        seed: int = 0,
        name: str = "dcn_network",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        for setting, value, known in (
            ("head", head, _HEADS),
            ("structure", structure, get_args(Structure)),
        ):
            if value not in known:
                raise ConfigError(f"{name}: {setting} must be {' or '.join(map(repr, known))}, got {value!r}")
        if not 0.0 <= dropout < 1.0:
            raise ConfigError(f"{name}: dropout must lie in [0, 1), got {dropout!r}")
        self.settings: dict[str, Any] = {
            "features": list(features),
            "floats": list(floats),
            "cross": cross,
            "rank": rank,
            "hidden": list(hidden),
            "structure": structure,
            "dropout": dropout,
            "head": head,
            "outputs": outputs,
            "seed": seed,
        }
        self.cross = CrossLayers(cross, rank=rank, seed=seed)
        self.drop = tf.keras.layers.Dropout(dropout, seed=seed)

    def build(self, shapes: Mapping[str, Any]) -> None:
        """Make the weights for vectors of these widths."""
        s = self.settings
        width = sum(int(shapes[name][-1]) for name in s["features"]) + len(s["floats"])
        both = s["structure"] == "parallel"
        last = width + s["hidden"][-1] if both and s["hidden"] else (s["hidden"] or [width])[-1]
        sizes = [*zip([width, *s["hidden"]], s["hidden"], strict=False), (last, s["outputs"])]
        self.dense = []
        for number, size in enumerate(sizes):
            name = "head" if number == len(s["hidden"]) else f"deep{number + 1}"
            start = tf.keras.initializers.GlorotNormal(seed=1000 * s["seed"] + 500 + number)
            self.dense.append(
                (
                    self.add_weight(f"{name}/kernel", size, initializer=start),
                    self.add_weight(f"{name}/bias", [size[1]], initializer="zeros"),
                )
            )
        super().build(shapes)

    def call(self, x: Mapping[str, tf.Tensor], training: bool | None = None) -> tf.Tensor:
        """Run the network on vectors and floats, by name."""
        s = self.settings
        parts = [x[name] for name in s["features"]]
        if s["floats"]:
            parts.append(tf.stack([x[name] for name in s["floats"]], axis=-1))
        joined = tf.concat(parts, axis=-1)
        crossed = self.cross(joined)
        deep = joined if s["structure"] == "parallel" else crossed
        for kernel, bias in self.dense[:-1]:
            deep = self.drop(tf.nn.relu(dense(deep, kernel, bias)), training=training)
        if s["structure"] == "parallel":
            deep = tf.concat([crossed, deep], axis=-1) if s["hidden"] else crossed
        outputs = dense(deep, *self.dense[-1])
        return tf.sigmoid(outputs) if s["head"] == "ctr" else outputs

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), **self.settings}


@tf.keras.saving.register_keras_serializable("gmeta")
class DCN(Model):
    r"""DCN-v2: embeddings and floats side by side, crossed by `CrossLayers`, and a multilayer perceptron.

    For the embeddings and floats of a sample side by side, :math:`x_0`, and cross layers C:

    .. math:: \hat y = \sigma(w^T [C(x_0); \mathrm{MLP}(x_0)]) \quad \text{or} \quad
       \hat y = \sigma(w^T\, \mathrm{MLP}(C(x_0)))

    The first is the ``"parallel"`` structure of the paper's figure 1, the second the ``"stacked"`` one.

    Args:
      collection: The features, of any widths; one with several ids per sample needs a combiner.
      floats: The names of float columns, one number per sample; scale them to about one.
      cross: The number of cross layers.
      rank: The rank of their matrices; None: full matrices.
      hidden: Units of the perceptron's layers, each with ReLU; none: crosses alone.
      structure: ``"parallel"`` or ``"stacked"``.
      dropout: The share of the perceptron's units that are dropped in training.
      head: ``"ctr"``: outputs are probabilities, for ``loss="binary_crossentropy"``. ``"rating"``: they are
        any numbers, such as logits, and :math:`\sigma` above is left out.
      outputs: The number of outputs.
      seed: The seed of the initial weights and of dropout.
      name: The model's name.

    Shapes:
      {feature: ids, column: (samples,)} -> (samples, outputs).

    Raises:
      ConfigError: A setting is out of its range, or a column is a feature and a float column.

    Example:
      >>> features = EmbeddingCollection([FeatureConfig("user", dim=8), FeatureConfig("item", dim=16)])
      >>> model = DCN(features, floats=["price"], cross=3, rank=8)
      >>> model.compile("adam", "binary_crossentropy", metrics=["AUC"])
    """

    def __init__(
        self,
        collection: EmbeddingCollection,
        *,
        floats: Sequence[str] = (),
        cross: int = 2,
        rank: int | None = None,
        hidden: Sequence[int] = (64, 32),
        structure: Structure = "parallel",
        dropout: float = 0.0,
        head: Literal["ctr", "rating"] = "ctr",
        outputs: int = 1,
        seed: int = 0,
        name: str = "dcn",
    ) -> None:
        super().__init__(name=name)
        features = [feature.name for feature in collection.features]
        both = [column for column in floats if column in features]
        if both:
            raise ConfigError(f"{name}: {', '.join(both)} can't be a feature and a float column")
        collection.in_order(name)
        self.collection = collection
        self._floats = tuple(floats)
        self.network = DCNNetwork(
            features,
            floats=floats,
            cross=cross,
            rank=rank,
            hidden=hidden,
            structure=structure,
            dropout=dropout,
            head=head,
            outputs=outputs,
            seed=seed,
        )

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Compute the outputs of samples, (samples, outputs)."""
        names = [feature.name for feature in self.collection.features]
        vectors = self.collection({name: inputs[name] for name in names})
        floats = {name: tf.cast(inputs[name], tf.float32) for name in self._floats}
        return self.network({**vectors, **floats}, training=training)

    def build_from_config(self, config: Mapping[str, Any]) -> None:
        """Make the weights, as Keras does when it loads a model: from ids, where it would send floats."""
        ids = {feature.name for feature in self.collection.features}
        kinds = {name: tf.int64 if name in ids else tf.float32 for name in config["input_shape"]}
        one = {name: [1, *(size or 1 for size in shape[1:])] for name, shape in config["input_shape"].items()}
        self({name: tf.zeros(shape, kinds[name]) for name, shape in one.items()})

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        own = {name: value for name, value in self.network.settings.items() if name != "features"}
        collection = tf.keras.saving.serialize_keras_object(self.collection)
        return {"collection": collection, **own, "name": self.name}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> DCN:
        """Create the model that a config from `get_config` describes."""
        collection = tf.keras.saving.deserialize_keras_object(config["collection"], custom_objects)
        return cls(**{**config, "collection": collection})
