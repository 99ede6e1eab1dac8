"""The start of ranks that train together, and one step that all of them take.

Before the first step, all ranks check that their settings agree, and get the same weights (`start_together`).

A rank whose data has ended takes steps on batches of no samples. These steps contribute nothing, and they
must not change the rank's own state: a layer's moving average of no values would be NaN. When no rank has
samples any more, the step raises the error of an exhausted iterator, on all ranks in the same step. Keras
takes that as the end of the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.graph import hold, read_where_it_is
from gmeta.core.keras import submodules
from gmeta.layers import EmbeddingCollection
from gmeta.layers.embedding.table_weights import tables_of
from gmeta.layers.exchange.recorded_lookups import StepSamples, step_samples
from gmeta.metrics.auc import SampleMetric

ADVICE = "run the same script with the same settings on every rank, and load weights on every rank"


def start_together(model: tf.keras.Model, element_spec: Any, batch: Any, loop: Mapping[str, Any]) -> None:
    """Refuse to train different models, then give all ranks the dense weights and optimizer state of rank 0.

    All ranks must call this together. The rows of tables aren't sent, because they are functions of seed and
    key.

    Args:
      model: The compiled model. If it has no weights yet, it is called on ``batch`` to create them.
      element_spec: The data's element specification.
      batch: A batch of the data, which may have no samples.
      loop: The arguments of `fit` that must be the same on all ranks, name -> value.

    Raises:
      ConfigError: Ranks differ; the message says which ranks and in what.
    """
    collectives.check_agreement(
        {**settings_of(model), **{name: repr(value) for name, value in loop.items()}}, advice=ADVICE
    )
    collectives.check_agreement({"form of the data": _form(element_spec)}, advice=ADVICE)
    if model.built:
        model.merge_moving_averages()  # of steps outside of fit; else only rank 0's would count
    make_variables(model, batch)
    collectives.gather_states(model)
    state = model.optimizer.variables
    state = state() if callable(state) else state
    joint = model.joint_optimizer
    divided = {id(slot) for slot in joint.divided_slots}  # by an earlier fit; each is at its owner
    variables = list({id(v): v for v in [*model.variables, *state] if id(v) not in divided}.values())
    collectives.broadcast_variables([v for v in variables if _travels(v)])
    if joint.divides:
        joint.divide(model.trainable_variables)


def make_variables(model: tf.keras.Model, batch: Any) -> None:
    """Make the variables of a compiled model and of its optimizer that its first step would make.

    Args:
      model: If it has no weights yet, it is called on ``batch`` to create them.
      batch: A batch of the data, which may have no samples.
    """
    if not model.built:
        x, _, _ = tf.keras.utils.unpack_x_y_sample_weight(batch)
        model(x, training=False)
    if hasattr(model.optimizer, "build"):
        model.optimizer.build(model.trainable_variables)


def settings_of(model: tf.keras.Model) -> dict[str, str]:
    """Return the settings that must be the same on all ranks: name -> value, as text."""
    settings = {f"{model.name}'s compile settings": _text(_compile_config(model))}
    for table in tables_of(model):  # weights that only some ranks have loaded
        settings[f"the step of table {table.name!r}"] = str(int(table.step()))
    for layer in submodules(model):
        if isinstance(layer, EmbeddingCollection):
            for name, value in layer.get_config().items():
                settings[f"{layer.name}'s {name}"] = _text(value)
    return settings


def _compile_config(model: tf.keras.Model) -> Any:
    try:
        return model.get_compile_config()
    except Exception:  # settings that Keras can't serialize, such as a user's own loss
        return type(model.optimizer).__name__


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)


def _form(spec: Any) -> str:
    """Describe an element's parts by name and type. Their sizes are left out, as they may differ."""
    parts = [
        f"{type(part).__name__} {getattr(part, 'dtype', None)} rank {part.shape.rank}"
        for part in tf.nest.flatten(spec)
    ]
    return f"{tf.nest.map_structure(lambda _: 0, spec)} of {parts}"


def _travels(variable: tf.Variable) -> bool:
    return variable.dtype != tf.string and variable.dtype != tf.resource


class KeptState:
    """The state of a model's layers and metrics as it was when this object was made.

    Args:
      model: The model; None: no state.
    """

    def __init__(self, model: tf.keras.Model | None) -> None:
        # Reading a variable that the step doesn't write costs no copy.
        self._kept = [] if model is None else [(v, v.read_value()) for v in _state(model)]

    @tf.autograph.experimental.do_not_convert
    def restore_unless(self, changed: tf.Tensor) -> tf.Tensor:
        """Restore the state unless ``changed``, () bool; return a tensor that is computed after that."""
        return tf.cond(changed, _nothing, self._restore)

    def _restore(self) -> tf.Tensor:
        for variable, value in self._kept:
            variable.assign(value)
        return _nothing()


class RankStep:
    """A step of one rank among several. With only one rank it does nothing."""

    def __init__(self, model: tf.keras.Model, samples: StepSamples | None) -> None:
        self._samples = samples
        self._kept = KeptState(None if samples is None else model)

    def end_forward(self, tensors: Any) -> Any:
        """End the forward pass and the metrics; call this before any weight is updated.

        Args:
          tensors: The tensors that the rest of the step uses, a nest that may contain None.

        Returns:
          The same tensors. They are available only if the step goes on.

        Raises:
          tf.errors.OutOfRangeError: No rank has samples. Computing the returned tensors raises it.
        """
        samples = self._samples
        if samples is None:
            return tensors
        restored = self._kept.restore_unless(samples.own > 0)
        if samples.everywhere is None:  # no lookup has exchanged the numbers
            (samples.everywhere,) = collectives.allreduce_sum([samples.own], name="step/samples")
        with tf.control_dependencies([restored, *samples.before_end]):
            over = tf.identity(samples.everywhere) <= 0
        ended = tf.cond(over, _end, _nothing)
        return hold(tensors, [ended])


@contextmanager
def rank_step(model: tf.keras.Model, data: Any) -> Iterator[RankStep]:
    """Begin a step on a batch.

    Args:
      model: The model.
      data: The batch, a nest of tensors whose first dimension is samples.
    """
    if collectives.world().size == 1:
        yield RankStep(model, None)
        return
    with tf.device("CPU:0"):
        own = batch_size(data)
    with step_samples(own) as samples:
        yield RankStep(model, samples)


def batch_size(data: Any) -> tf.Tensor:
    """Return the first dimension of the first part of a batch that has one, () int64; 1 if none has."""
    for part in tf.nest.flatten(data):
        if isinstance(part, tf.RaggedTensor):
            return tf.cast(part.nrows(), tf.int64)
        if isinstance(part, tf.SparseTensor):
            return tf.cast(part.dense_shape[0], tf.int64)
        if part is not None and part.shape.rank != 0:
            return tf.shape(part, out_type=tf.int64)[0]
    return tf.constant(1, tf.int64)


def _state(model: tf.keras.Model) -> Sequence[tf.Variable]:
    """Return the variables that a forward pass may change: the state of layers and metrics."""
    own = [*model.non_trainable_variables, *(v for metric in model.metrics for v in metric.variables)]
    return list({id(variable): variable for variable in own}.values())


def _nothing() -> tf.Tensor:
    return tf.constant(True)


def _end() -> tf.Tensor:
    # TensorFlow's ops that raise OutOfRangeError are those that read a data set.
    iterator = iter(tf.data.Dataset.range(0))
    return iterator.get_next() >= 0


# Merges the ranks' metrics into metrics of all ranks' samples.
#
# A Keras metric keeps sums (of values and weights, or of a histogram's counts), and its variables have the
# aggregation SUM. So the ranks' sums are added up and the result is computed from the totals: an AUC of all
# samples, not a mean of AUCs. A metric that keeps samples (`gmeta.metrics.auc.SampleMetric`) gathers those of
# all ranks.


def merge_over_ranks(metrics: Iterable[tf.keras.metrics.Metric]) -> None:
    """Give every rank's metrics the state that one rank would have after seeing all samples.

    Call this eagerly, on all ranks, and only once: afterwards every rank's state covers all samples. The next
    ``reset_state`` makes the state the rank's own again. Variables whose aggregation is MEAN become the mean.
    Variables with an aggregation other than SUM and MEAN stay the rank's own.

    Args:
      metrics: The metrics, the same on all ranks.
    """
    size = collectives.world().size
    if size == 1:
        return
    metrics = list({id(metric): metric for metric in metrics}.values())
    for metric in metrics:
        if isinstance(metric, SampleMetric):
            metric.gather_over_ranks()
    variables = list({id(v): v for metric in metrics for v in metric.variables}.values())
    summed = [v for v in variables if v.aggregation in _SHARE]
    if not summed:
        return
    # float64 is exact for counts, and one dtype needs only one collective.
    totals = collectives.allreduce_sum([tf.cast(v, tf.float64) for v in summed], name="metrics")
    for variable, total in zip(summed, totals, strict=True):
        share = total / size if variable.aggregation == tf.VariableAggregation.MEAN else total
        if variable.dtype.is_integer:
            share = tf.round(share)
        variable.assign(tf.cast(share, variable.dtype))


_SHARE = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)


# A rank's notes during training: how many samples it saw, and whether it or all ranks want to stop.


class RankNotes:
    """Three variables of a rank, which belong in no checkpoint.

    Attributes:
      seen: () int64: on several ranks, the number of samples that this rank trained on since the variable was
        last reset to 0 (`gmeta.training.rank_loops`).
      stop_asked: () bool: whether this rank wants all to stop (`gmeta.training.rank_loops`).
      stop_agreed: () bool: whether all ranks have agreed to stop.
    """

    # Not a Trackable on purpose: checkpoints don't hold it.

    def __init__(self) -> None:
        with tf.device("CPU:0"):  # read between two steps, which needn't wait for a GPU
            self.seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="samples_seen")
            self.stop_asked = tf.Variable(False, trainable=False, name="stop_asked")
            self.stop_agreed = read_where_it_is(tf.Variable(False, trainable=False, name="stop_agreed"))
