"""Finds what a batch will look up before its step.

A model may define this itself (`gmeta.models.Model.lookup_inputs`). Otherwise its forward pass is traced once
with placeholders for rows, and only the part of the graph is kept that computes the lookups' keys from the
batch. That requires that the keys depend only on the batch and the number of its step
(`gmeta.models.Model.step_number`); otherwise the error states what they depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.step import StepNumber, step_context, use_clock, within_step
from gmeta.layers import record_lookups
from gmeta.layers.exchange.ahead import Wanted, note_lookups

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
