"""Networks that run with weights passed by the caller: dense layers, and any Keras network, one set per task.

`MLP` takes its weights as arguments, or runs with its own. `TaskNetwork` does the same for any network.
Keras layers read their weights from their attributes. During a call, it replaces the variables in the
attributes of the adapted weights by tensors, so the layers compute with those tensors. `tf.vectorized_map`
runs the tasks side by side (`map_tasks`). It turns the ops of one task into batched ops: matrix products with
one kernel per task become one batched product. The layers need no support for tasks.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.keras import submodules
from gmeta.core.step import step_context, within_step
from gmeta.ops.hstu_layer import residual


def dense(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tf.Tensor:
    """Compute ``x @ kernel + bias``, with one kernel for all tasks or one per task.

    Args:
      x: (..., samples, in).
      kernel: (in, out), or (tasks, in, out) for x of shape (tasks, samples, in).
      bias: (out,), or (tasks, out) if the kernel has a task dimension.

    Returns:
      (..., samples, out).
    """
    product = tf.matmul(x, kernel)
    if bias.shape.rank == 1 and not is_mapped():
        return residual(None, product, bias)
    return product + tf.expand_dims(bias, -2)


@tf.keras.saving.register_keras_serializable("gmeta")
class MLP(tf.keras.layers.Layer):
    r"""A multilayer perceptron: ReLU between the layers, none after the last.

    A layer's kernel and bias start at :math:`U(-1/\sqrt{in}, 1/\sqrt{in})`, the convention behind the
    published results of MAML and MeLU. Keras' default (Glorot kernels, zero biases) starts wider networks
    from different values and shifts the results.

    Args:
      layers: Layer name -> number of units, in order from the input, e.g.
        ``{"fc1": 64, "fc2": 64, "out": 1}``.
      adapt: The layers whose weights a task adapts. None: all layers.
      seed: Seed of the initial values.

    Shapes:
      (..., samples, in) -> (..., samples, units of the last layer).

    Example:
      >>> stack = MLP({"fc1": 8, "out": 1}, adapt=["out"])
      >>> stack(tf.zeros([3, 5])).shape
      TensorShape([3, 1])
      >>> sorted(stack.fast_weights())
      ['out/bias', 'out/kernel']
    """

    def __init__(
        self,
        layers: Mapping[str, int],
        *,
        adapt: Sequence[str] | None = None,
        seed: int = 0,
        name: str = "mlp",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        unknown = sorted(set(adapt or ()) - set(layers))
        if unknown:
            raise ConfigError(f"adapt names {', '.join(unknown)}, but the layers are {', '.join(layers)}")
        self.units = dict(layers)
        self.adapt = list(layers) if adapt is None else list(adapt)
        self.seed = seed
        self._weights_of: dict[str, tf.Variable] = {}

    def build(self, input_shape: tf.TensorShape) -> None:
        """Create the weights for inputs of the given last dimension."""
        fan_in = int(tf.TensorShape(input_shape)[-1])
        for index, (layer, units) in enumerate(self.units.items()):
            limit = 1 / math.sqrt(fan_in)
            for part, (kind, shape) in enumerate((("kernel", (fan_in, units)), ("bias", (units,)))):
                # Each weight has its own seed, because initialisers with equal seeds draw equal numbers.
                initializer = tf.keras.initializers.RandomUniform(
                    -limit, limit, seed=1000 * self.seed + 2 * index + part
                )
                self._weights_of[f"{layer}/{kind}"] = self.add_weight(
                    name=f"{layer}/{kind}", shape=shape, initializer=initializer
                )
            fan_in = units
        super().build(input_shape)

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return all weights: ``"layer/kernel"`` and ``"layer/bias"`` -> variable."""
        return dict(self._weights_of)

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return the weights that a task adapts: ``"layer/kernel"`` and ``"layer/bias"`` -> variable."""
        return {name: self._weights_of[name] for name in self._weights_of if name.split("/")[0] in self.adapt}

    def call(
        self, x: tf.Tensor, weights: Mapping[str, tf.Tensor] | None = None, training: bool | None = None
    ) -> tf.Tensor:
        """Run the layers.

        Args:
          x: (..., samples, in).
          weights: Weight name -> replacement, of the variable's shape or with a leading task dimension.
            Weights that aren't named keep their own values.
          training: Has no effect.
        """
        return self.beyond_first(self._dense(self.first, x, weights), weights)

    @property
    def first(self) -> str:
        """The name of the first layer."""
        return next(iter(self.units))

    def beyond_first(self, x: tf.Tensor, weights: Mapping[str, tf.Tensor] | None = None) -> tf.Tensor:
        """Run the layers after the first.

        Args:
          x: (..., samples, units), the first layer's output before its activation.
          weights: As in `call`.
        """
        for layer in list(self.units)[1:]:
            x = self._dense(layer, tf.nn.relu(x), weights)
        return x

    def _dense(self, layer: str, x: tf.Tensor, weights: Mapping[str, tf.Tensor] | None) -> tf.Tensor:
        used = (
            (weights or {}).get(name, self._weights_of[name]) for name in (f"{layer}/kernel", f"{layer}/bias")
        )
        # Under mixed precision x has the layer's compute dtype, while a task's own weights are float32.
        return dense(x, *(tf.cast(value, x.dtype) for value in used))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "layers": self.units, "adapt": self.adapt, "seed": self.seed}


# Loads models that were saved when this layer was still called DenseStack.
tf.keras.saving.get_custom_objects()["gmeta>DenseStack"] = MLP

# Runs a function for each task of a batch, side by side in a graph.


def is_mapped() -> bool:
    """Return whether the graph of one task is being made, for `map_tasks` to turn into that of all tasks.

    The shapes in such a graph mustn't depend on values, because tasks would have different ones.
    """
    return step_context().mapped


def map_tasks(one_task: Callable[[tuple[Any, ...]], tf.Tensor], elements: tuple[Any, ...]) -> tf.Tensor:
    """Apply ``one_task`` to each task's elements and stack the results.

    Args:
      one_task: Maps a task's elements to a tensor.
      elements: A nest of tensors (tasks, ...). On several ranks there may be no tasks.
    """
    first = tf.nest.flatten(elements)[0]
    tasks = first.shape[0]
    if not (tf.executing_eagerly() and tasks):
        may_be_none = not tasks and collectives.world().size > 1
        mapped = _at_least_one(elements) if may_be_none else elements
        results = tf.vectorized_map(lambda each: _in_a_map(one_task, each), mapped)
        return results[: tf.shape(first)[0]] if may_be_none else results
    # In eager mode vectorized_map would trace a new graph in each call, slower than running task after task.
    of = [tf.nest.map_structure(lambda part, task=task: part[task], elements) for task in range(tasks)]
    return tf.stack([one_task(each) for each in of])


@tf.autograph.experimental.do_not_convert
def _at_least_one(elements: Any) -> Any:
    """Return the elements of tasks, or those of a task of zeros if there are none.

    A rank whose data has ended takes steps without tasks. `tf.vectorized_map` infers a dimension of a product
    from its number of elements, and is wrong if that is 0.
    """
    parts = tf.nest.flatten(elements)

    def zeros() -> list[tf.Tensor]:
        return [tf.zeros(tf.concat([[1], tf.shape(part)[1:]], axis=0), part.dtype) for part in parts]

    some = tf.cond(tf.shape(parts[0])[0] > 0, lambda: [tf.identity(part) for part in parts], zeros)
    for part, given in zip(some, parts, strict=True):
        part.set_shape([None, *given.shape[1:]])
    return tf.nest.pack_sequence_as(elements, some)


def _in_a_map(one_task: Callable[[tuple[Any, ...]], tf.Tensor], elements: tuple[Any, ...]) -> tf.Tensor:
    with within_step(mapped=True):
        return one_task(elements)


@tf.keras.saving.register_keras_serializable("gmeta")
class TaskNetwork(tf.keras.layers.Layer):
    """A Keras layer or model that can run with a task's own weights.

    Args:
      network: Maps (samples, ...) inputs to (samples, outputs); a model of several inputs takes a dict.
        It must treat each sample independently. A layer that keeps batch statistics, such as
        BatchNormalization, would make a task depend on the other tasks in the batch and is refused.

    Shapes:
      (tasks, samples, ...) -> (tasks, samples, outputs).

    Raises:
      ConfigError: The network has a layer that keeps batch statistics.

    Example:
      >>> network = tf.keras.Sequential(
      ...     [tf.keras.layers.Dense(8, "relu", name="fc"), tf.keras.layers.Dense(1, name="out")]
      ... )
      >>> tasks = TaskNetwork(network)
      >>> tasks(tf.zeros([2, 3, 5])).shape
      TensorShape([2, 3, 1])
      >>> sorted(tasks.fast_weights())
      ['fc/bias', 'fc/kernel', 'out/bias', 'out/kernel']
    """

    def __init__(self, network: tf.keras.layers.Layer, **kwargs: Any) -> None:
        super().__init__(**{"name": f"tasks_of_{network.name}", **kwargs})
        self.network = network
        self._takes_training = "training" in inspect.signature(network.call).parameters
        statistics = [layer.name for layer in _layers(network) if isinstance(layer, _STATISTICS)]
        if statistics:
            raise ConfigError(
                f"{network.name}: {', '.join(statistics)} keeps statistics of batches, by which tasks would "
                "depend on each other: normalize by sample, with tf.keras.layers.LayerNormalization"
            )

    def fast_weights(self) -> dict[str, tf.Variable]:
        """Return the weights that a task adapts: all of `task_weights`."""
        return self.task_weights()

    def task_weights(self) -> dict[str, tf.Variable]:
        """Return the trainable weights: ``"layer/weight"`` -> variable.

        A nested layer's name follows its parent's, as in ``"attention/query/kernel"``.
        """
        if not self.network.built:
            raise ConfigError(f"{self.network.name} has no weights yet: call it once")
        trained = {id(variable) for variable in self.network.trainable_variables}
        found: dict[str, tf.Variable] = {}
        for path, layer in _own_layers(self.network):
            for variable in _variables_in(layer):
                if id(variable) in trained:
                    found[_new_name(found, path, variable)] = variable
                    trained.discard(id(variable))
        if trained:
            lost = [v.name for v in self.network.trainable_variables if id(v) in trained]
            raise ConfigError(
                f"{self.network.name}: {', '.join(lost)} is no attribute of a layer, so a task's own can't "
                "be put in its place: keep it as `self.name = self.add_weight(...)`"
            )
        return found

    def call(
        self, x: Any, weights: Mapping[str, tf.Tensor] | None = None, training: bool | None = None
    ) -> tf.Tensor:
        """Run the network.

        Args:
          x: (tasks, samples, ...), or a nest of such tensors.
          weights: Weight name -> replacement, of the variable's shape or with a leading task dimension.
            Weights that aren't named keep their own values.
          training: As in Keras.
        """
        variables = self.task_weights() if weights else {}
        own: dict[int, tf.Tensor] = {}
        shared: dict[int, tf.Tensor] = {}
        for name, value in (weights or {}).items():
            variable = variables[name]
            (own if value.shape.rank > variable.shape.rank else shared)[id(variable)] = value
        if not own:
            with replace_weights(self.network, shared):
                return _over_samples(lambda samples: self._run(samples, training), x)
        keys = list(own)

        def one_task(elements: tuple[Any, ...]) -> tf.Tensor:
            samples, *values = elements
            with replace_weights(self.network, {**shared, **dict(zip(keys, values, strict=True))}):
                return self._run(samples, training)

        return map_tasks(one_task, (x, *own.values()))

    def _run(self, samples: Any, training: bool | None) -> tf.Tensor:
        outputs = self.network(samples, training=training) if self._takes_training else self.network(samples)
        return outputs[:, tf.newaxis] if outputs.shape.rank == 1 else outputs

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "network": tf.keras.saving.serialize_keras_object(self.network)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TaskNetwork:
        """Recreate the layer from what `get_config` returned."""
        return cls(**{**config, "network": tf.keras.saving.deserialize_keras_object(config["network"])})


_STATISTICS = (tf.keras.layers.BatchNormalization,)


@contextmanager
def replace_weights(network: tf.keras.layers.Layer, values: Mapping[int, tf.Tensor]) -> Iterator[None]:
    """Let a network's layers read tensors in place of variables inside the ``with`` block.

    Args:
      network: The network.
      values: ``id(variable)`` -> the tensor to read in its place.
    """
    if not values:
        yield
        return
    undo: list[tuple[dict[str, Any], str, Any]] = []
    for layer in _layers(network):
        for name, held in list(vars(layer).items()):
            if name.startswith(_LISTS_OF_KERAS):
                continue
            changed = _with_values(held, values, layer)
            if changed is not held:
                undo.append((vars(layer), name, held))
                vars(layer)[name] = changed
    try:
        yield
    finally:
        for attributes, name, held in undo:
            attributes[name] = held


# Attributes in which Keras lists what a layer has. A forward pass doesn't read weights from them.
_LISTS_OF_KERAS = ("_trainable_weights", "_non_trainable_weights", "_self_", "_obj_reference", "_metrics")


def _with_values(held: Any, values: Mapping[int, tf.Tensor], layer: tf.keras.layers.Layer) -> Any:
    if isinstance(held, tf.Variable):
        if id(held) not in values:
            return held
        value = values[id(held)]
        # Under mixed precision, reading a layer's variable gives its compute dtype.
        casts = type(held).__name__.startswith("AutoCast")
        return tf.cast(value, layer.compute_dtype) if casts else value
    if isinstance(held, Mapping) and any(isinstance(part, tf.Variable) for part in held.values()):
        return {key: _with_values(part, values, layer) for key, part in held.items()}
    if isinstance(held, list | tuple) and any(isinstance(part, tf.Variable) for part in held):
        return [_with_values(part, values, layer) for part in held]
    return held


def _over_samples(run: Any, x: Any) -> tf.Tensor:
    """Run on the samples of all tasks as one batch, (tasks, samples, ...) -> (tasks, samples, ...)."""
    first = tf.nest.flatten(x)[0]
    leading = tf.shape(first)[:2]
    flat = tf.nest.map_structure(
        lambda part: (
            tf.reshape(part, tf.concat([[-1], tf.shape(part)[2:]], 0))
            if None in part.shape[2:]
            else tf.reshape(part, [-1, *part.shape[2:]])
        ),
        x,
    )
    outputs = run(flat)
    shaped = tf.reshape(outputs, tf.concat([leading, tf.shape(outputs)[1:]], 0))
    return tf.ensure_shape(shaped, [*first.shape[:2], *outputs.shape[1:]])


def _layers(network: tf.keras.layers.Layer) -> list[tf.keras.layers.Layer]:
    return [part for part in (network, *submodules(network)) if isinstance(part, tf.keras.layers.Layer)]


def _own_layers(network: Any, path: Sequence[str] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every layer once, in the order of the forward pass, sublayers before the layer they are in."""
    for child in network._flatten_layers(recursive=False, include_self=False):
        yield from _own_layers(child, (*path, child.name))
    yield (tuple(path) or (network.name,)), network


def _variables_in(layer: tf.keras.layers.Layer) -> Iterator[tf.Variable]:
    for name, held in vars(layer).items():
        if not name.startswith(_LISTS_OF_KERAS):
            parts = held.values() if isinstance(held, Mapping) else held if isinstance(held, list) else [held]
            yield from (part for part in parts if isinstance(part, tf.Variable))


def _new_name(taken: Mapping[str, tf.Variable], path: Sequence[str], variable: tf.Variable) -> str:
    name = "/".join([*path, variable.name.split("/")[-1].split(":")[0]])
    numbers = (f"{name}_{number}" for number in itertools.count(1))  # two sublayers of one name
    return name if name not in taken else next(other for other in numbers if other not in taken)
