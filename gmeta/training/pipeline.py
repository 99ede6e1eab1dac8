"""`Pipeline`, the argument ``pipeline`` of `compile`, and what a batch will look up, found before its step.

A model may define itself what it looks up (`gmeta.models.Model.lookup_inputs`). Otherwise its forward pass is
traced once with placeholders for rows, and only the part of the graph is kept that computes the lookups' keys
from the batch. That requires that the keys depend only on the batch and the number of its step
(`gmeta.models.Model.step_number`); otherwise the error states what they depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.step import StepNumber, step_context, use_clock, within_step
from gmeta.layers import record_lookups
from gmeta.layers.exchange.fetch import Wanted, note_lookups
from gmeta.layers.exchange.window_keys import MOST_MICRO_BATCHES


@tf.keras.saving.register_keras_serializable("gmeta")
@dataclass(frozen=True)
class Pipeline:
    """How a training step fetches ahead of its batch, and computes it in parts (NestPipe).

    Depth (the paper's dual buffer): nothing that a step computes depends on it. Rows, slots, frequencies,
    evictions, losses and checkpoints are those of depth 0, bit for bit. What is fetched ahead has no effects,
    and a row that changes between its fetch and its step is read again. What is looked up may depend on the
    number of the step, as the negatives of `gmeta.models.NextItemModel` do. It is predicted, and a batch for
    which it was wrong is fetched again: a callback has set ``optimizer.iterations`` (on several ranks all
    must set the same), or an epoch has ended during an accumulation. Only an error in a batch, such as a bad
    id, is raised up to `depth` steps earlier.

    When training ends before the data does, up to `depth` batches were read and not trained. Checkpoints
    count the trained ones, so `gmeta.checkpoint.ShardedCheckpoint` reads the others again, on however many
    ranks an elastic job goes on. Of data that can be read only once, such as a queue, they are lost.

    Micro-batches (its frozen windows): parameters change only at the end of a step, so a step may compute its
    batch in parts. Each row still travels once, before the first part that uses it, and its gradient once,
    after the last; both travel while another part computes. A part takes the memory of its own forward and
    backward pass. Gradients are sums over the parts, weighted by samples, and make one update, which equals
    that of the whole batch up to rounding. So the loss must be a mean over samples. What relates samples of a
    batch to each other sees only those of a part: the means and variances of ``BatchNormalization``, and
    negatives that samples share. Random numbers, such as those of ``Dropout``, are drawn for each part.
    Frequencies, evictions and statistics of tables are those of the whole batch, exactly.

    A part has whole samples; of batches of tasks it has whole tasks, and of `gmeta.models.GRM` and
    `gmeta.models.NextItemModel` whole users. `gmeta.models.Model.split_batch` makes the parts.

    Tables may be in host memory or on a GPU. The keys of micro-batches are divided in host memory, and travel
    from there. For tables on a GPU with rows in host memory (`gmeta.policies.Tiers`), the rows of a batch
    begin to move to the GPU when its keys have reached their owners, by one prefetch per table. With depth 2
    they have a whole step for it; with depth 1, the rest of one.

    Args:
      depth: 0: a step begins with an exchange of its keys, then reads the rows. 1: while a batch computes,
        the keys of the next one go to the ranks that own them, and its rows are read there. 2: the keys are
        sent two batches ahead and the rows read one batch ahead, so that neither waits for the other. Each
        batch ahead takes the memory of its data, keys and rows.
      micro_batches: The number of parts in which a step computes its batch, 1 to 8.
      cluster: Whether samples (tasks, users) that share keys come into the same part, in place of their order
        in the batch; `gmeta.models.Model.unit_keys` gives the keys. The bytes stay the same, because each row
        travels once in any case. Fewer rows are held from one part to a later one, and the first part waits
        for fewer. Each rank divides its own batch; an error that names a sample by its number may mean the
        new order.

    Raises:
      ConfigError: The depth isn't 0, 1 or 2, the number of micro-batches isn't within 1 to 8,
        or there is only one to cluster.

    Example:
      >>> Pipeline(depth=1, micro_batches=4)
      Pipeline(depth=1, micro_batches=4, cluster=False)
    """

    depth: int = 1
    micro_batches: int = 1
    cluster: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        whole_number("Pipeline: depth", self.depth, least=0)
        if self.depth > 2:
            raise ConfigError(
                f"Pipeline: depth must be 0, 1 or 2, got {self.depth}: a batch has two stages before its step"
            )
        whole_number("Pipeline: micro_batches", self.micro_batches, least=1)
        if self.micro_batches > MOST_MICRO_BATCHES:
            raise ConfigError(
                f"Pipeline: micro_batches must be 1 to {MOST_MICRO_BATCHES}, got {self.micro_batches}: keys "
                "are divided by the first and the last micro-batch that uses them, and dividing them further "
                "costs more than it hides"
            )
        if not isinstance(self.cluster, bool):
            raise ConfigError(f"Pipeline: cluster must be True or False, got {self.cluster!r}")
        if self.cluster and self.micro_batches == 1:
            raise ConfigError(
                "Pipeline: cluster=True assigns samples to micro-batches, but there is only one: "
                "give micro_batches=2 to 8, or leave cluster out"
            )

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this object, in a form that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Pipeline:
        """Recreate the object from the result of `get_config`."""
        return cls(**config)


def check_pipeline(value: Any) -> Pipeline:
    """Return the argument ``pipeline`` of `compile`; None stands for depth 0.

    Raises:
      ConfigError: It isn't a `Pipeline`.
    """
    if value is None:
        return Pipeline(depth=0)
    if not isinstance(value, Pipeline):
        raise ConfigError(f"compile: pipeline must be a gmeta.Pipeline, got {value!r}")
    return value


# Gives a model the number of the optimizer step that trains a batch. A step's lookups may depend on it, such
# as negatives that are drawn in each step, and a pipeline must know them before the step. So it predicts the
# number, and while it finds the lookups, the model reads the prediction in place of the optimizer's count.


def use_step_number(number: tf.Tensor, note: Callable[[], None]) -> AbstractContextManager[None]:
    """Let `step_number` return a number in the ``with`` block.

    Args:
      number: The number, () int64.
      note: A function that is called when somebody reads the number.
    """
    return within_step(number=StepNumber(number, note))


def step_number(optimizer: Any) -> tf.Tensor:
    """Return the number of the optimizer step that trains the batch at hand, () int64, from 0 on.

    Args:
      optimizer: The Keras optimizer, whose count is the number outside of `use_step_number`.
    """
    predicted = step_context().number
    if predicted is None:
        return tf.convert_to_tensor(optimizer.iterations)
    predicted.note()
    return predicted.number


_FUNCTIONS = frozenset({"EagerPyFunc", "If", "PyFunc", "StatefulPartitionedCall", "While"})
_RANDOM = ("Random", "Multinomial", "SampleDistortedBoundingBox", "StatefulUniform", "StatefulStandardNormal")


def foresee(model: Any, spec: Any) -> Callable[[Any], list[Wanted]]:
    """Return a function that computes what a batch will look up, in the order of the step's lookups.

    Args:
      model: The compiled model.
      spec: The element specification of its data.

    Raises:
      ConfigError: The model looks up nothing, or its lookups depend on more than the batch and the number of
        its step. The function that is returned raises this too.
    """
    return _from_graph(model, spec) if model.lookup_inputs is None else _as_told(model)


def _as_told(model: Any) -> Callable[[Any], list[Wanted]]:
    def wanted(data: Any) -> list[Wanted]:
        told = model.lookup_inputs(data)
        return _some(model, [Wanted(one.fetch, tuple(one.keys_of(ids))) for one, ids in told])

    return wanted


def _from_graph(model: Any, spec: Any) -> Callable[[Any], list[Wanted]]:
    parts = tf.nest.flatten(spec, expand_composites=True)
    found: list[Wanted] = []
    reads: list[str] = []

    def forward(number: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
        data = tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)
        numbered = use_step_number(number, lambda: reads.append("number"))
        with note_lookups() as wanted, record_lookups(), numbered, use_clock(None):
            model.learn(data)
        found[:] = wanted
        return [key for one in wanted for key in one.keys]

    whole = tf.compat.v1.wrap_function(forward, [tf.TensorSpec([], tf.int64), *parts])
    _some(model, found)
    batch, keys = whole.inputs[: len(parts) + 1], whole.outputs
    for one in found:
        for key in one.keys:
            on = _dependence(keys[0].graph, key, batch, found)
            if on:
                raise ConfigError(
                    f"{model.name}: the ids that a step looks up in {one.fetch.name!r} depend on {on}, so "
                    "they can't be known before the step: let the model define lookup_inputs(data), which "
                    "computes them from the batch and from the model's step_number, or compile without "
                    "pipeline"
                )
    only_keys = whole.prune(batch, keys)

    def wanted(data: Any) -> list[Wanted]:
        number = step_number(model.optimizer) if reads else tf.constant(0, tf.int64)
        rest = iter(only_keys(number, *tf.nest.flatten(data, expand_composites=True)))
        return [one._replace(keys=tuple(next(rest) for _ in one.keys)) for one in found]

    return wanted


def _some(model: Any, wanted: list[Wanted]) -> list[Wanted]:
    if not wanted:
        raise ConfigError(
            f"{model.name}: compile(pipeline=...) fetches rows of the next batch, and the model looks up "
            "none: leave pipeline out"
        )
    return wanted


def _dependence(graph: Any, key: tf.Tensor, batch: Sequence[tf.Tensor], lookups: Sequence[Wanted]) -> str:
    """Return what a key depends on besides the batch; "" if it depends on nothing else."""
    given = {tensor.op for tensor in batch}
    captured = {inside.op: outside for outside, inside in graph.captures}
    folds = {id(table.mixes_ids) for one in lookups for table in one.fetch.tables}  # which no step changes
    variables = {id(each.handle): each.name for each in graph.variables if id(each) not in folds}
    rows = {tensor.op: one.fetch.name for one in lookups for tensor in one.stand_ins}
    for op in _ancestors(key.op):
        if op in rows:
            return f"the rows of the lookup in {rows[op]!r}"
        if op in captured and id(captured[op]) in variables:
            return f"the variable {variables[id(captured[op])]!r}"
        if op in given or op in captured:
            continue
        if op.op_def.is_stateful and op.type.startswith(_RANDOM):
            return f"random numbers of the op {op.name!r}"
        if op.type in _FUNCTIONS:
            return f"a function with effects, the op {op.name!r}"
    return ""


def _ancestors(op: Any) -> Iterator[Any]:
    """Yield an op and all that it depends on."""
    seen, rest = {op}, [op]
    while rest:
        each = rest.pop()
        yield each
        for before in (*(tensor.op for tensor in each.inputs), *each.control_inputs):
            if before not in seen:
                seen.add(before)
                rest.append(before)
