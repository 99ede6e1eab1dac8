"""Signatures of an exported `MetaModel`: predict, adapt to a task, and predict with the task's deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first
from gmeta.core.row_formats import RowDtype
from gmeta.export.delta_strings import WEIGHTS as WEIGHTS
from gmeta.export.delta_strings import DeltaStrings
from gmeta.export.delta_strings import Stale as Stale
from gmeta.export.derived import Derived
from gmeta.export.sequence_models import (
    LABELS,
    STATE,
    answers,
    exposure_signatures,
    state_signatures,
)
from gmeta.export.signature import PaddedSequences, Signature, feature_inputs
from gmeta.models import MetaGRM, MetaModel
from gmeta.models.meta.adapter import (
    TaskDeltas,
    outputs_with,
    query_only,
    query_outputs,
    task_deltas,
    tasks_in,
)
from gmeta.models.meta.fast_weights import DeltaDtype
from gmeta.models.sequence.user_states import UserStates, no_ids

LABEL = "label"
RATING = "rating"
PER_USER = "samples_per_user"


def meta_signatures(
    model: MetaModel,
    *,
    steps: int | None = None,
    dtype: DeltaDtype = "float32",
    stale: Stale = "refuse",
    answer: str = RATING,
    of_logits: bool = False,
) -> dict[str, Signature]:
    """Make the four signatures of a meta-learned model.

    ================  ====================================================  =====================
    signature         inputs                                                answer
    ================  ====================================================  =====================
    ``predict``       the features of n samples                             ``rating``
    ``adapt``         the features of a task's support samples, ``label``   ``weights_bytes``
    ``adapt_many``    those of many tasks, one after another, ``label``,    ``weights_bytes``
                      and ``samples_per_user`` (tasks,) int64               (tasks,)
    ``predict_with``  the features of n samples, ``weights_bytes``          ``rating``
    ================  ====================================================  =====================

    ``rating``, or the name given as ``answer``, is (n,) float32, or (n, outputs) if the network has several.
    ``label`` is (samples,) float32, or (samples, outputs). ``weights_bytes`` is () string: exactly the bytes
    of `gmeta.models.meta.fast_weights.FastWeights`, which a client stores and sends unchanged. So
    ``FastWeights.from_bytes`` reads the answer of ``adapt``, and ``predict_with`` takes
    ``FastWeights.to_bytes`` of either dtype.

    ``adapt`` runs the inner steps in the graph, like `MetaModel.adapt`, with the same values up to rounding.
    If the steps diverge on the samples, it returns an error that shows the range of the labels.
    ``adapt_many`` has for each task what ``adapt`` answers for it, up to rounding. For a task that ``adapt``
    refuses because its numbers diverge, it has the empty text, and the other tasks have their deltas.
    ``predict`` uses the shared weights, from which adaptation starts. Only ``InnerLoop("ridge")`` and
    training with ``steps=0`` train them to predict without adaptation.

    Args:
      model: The model, compiled.
      steps: Number of inner steps of ``adapt``; None: ``inner.steps_in("serving")``.
      dtype: The dtype of the deltas that ``adapt`` returns; ``"float16"`` takes half the bytes.
      stale: What ``predict_with`` does with deltas from other shared weights, such as those of the version
        that was served before: ``"refuse"``, so that clients adapt again, or ``"apply"``, which adds them to
        the present weights.
      answer: The name of the prediction, such as the label's name.
      of_logits: Whether the network's outputs are logits. If so, ``answer`` is their probability, and
        ``<answer>_logit`` is a second answer.

    Raises:
      ConfigError: The model isn't compiled; a setting has an unknown value; a feature has the name of one of
        these signatures' own inputs.
    """
    strings = DeltaStrings(model, steps, dtype, stale)
    inputs = sample_inputs(model)
    taken = sorted({LABEL, WEIGHTS, PER_USER} & set(inputs))
    if taken:
        raise ConfigError(
            f"{', '.join(taken)} can't be the name of a feature: a signature has an input of that name"
        )

    def answers(outputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {answer: tf.sigmoid(outputs), f"{answer}_logit": outputs} if of_logits else {answer: outputs}

    def predict(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        return answers(outputs_with(model.learner, _check(given), {}, {}))

    def adapt(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        given = _check(given)
        counts = tf.shape(given[LABEL], tf.int64)[:1]
        numbers = {name: given[name] for name in (LABEL, *inputs) if given[name].dtype.is_floating}
        return {WEIGHTS: strings.encode(learned(given, counts), numbers)}

    def adapt_many(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        counts = given[PER_USER]
        given = _check({name: given[name] for name in (LABEL, *inputs)})
        tasks = tf.size(counts)
        counts = tf.pad(_check_counts(counts, given[LABEL]), [[0, tf.cast(tasks == 0, tf.int32)]])
        return {WEIGHTS: strings.encode_many(learned(given, counts))[:tasks]}  # of no task: of an empty one

    def learned(given: dict[str, Any], counts: tf.Tensor) -> TaskDeltas:
        features = {name: given[name] for name in inputs}
        batch = tasks_in("support", features, given[LABEL], counts)
        return task_deltas(model.learner, batch, strings.steps)

    def predict_with(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        deltas, rows = strings.decode(given[WEIGHTS])
        features = _check({name: given[name] for name in inputs})
        return answers(outputs_with(model.learner, features, deltas, rows))

    outputs = _outputs(model, inputs)
    label = tf.TensorSpec([None] if outputs == 1 else [None, outputs], tf.float32)
    return {
        "predict": Signature(predict, inputs),
        "adapt": Signature(adapt, {**inputs, LABEL: label}),
        "adapt_many": Signature(
            adapt_many, {**inputs, LABEL: label, PER_USER: tf.TensorSpec([None], tf.int64)}
        ),
        "predict_with": Signature(predict_with, {**inputs, WEIGHTS: tf.TensorSpec([], tf.string)}),
    }


def sample_inputs(model: MetaModel) -> dict[str, tf.TypeSpec]:
    """Map columns to specs: the ids of features, and the numbers that the network takes by name."""
    inputs = feature_inputs(model.collection.features)
    given = getattr(getattr(model.network, "network", None), "input", None)  # a functional model's
    for name in model.learner.input_names or ():
        tensor = given.get(name) if isinstance(given, Mapping) else given
        if tensor is None:
            inputs.setdefault(name, tf.TensorSpec([None], tf.float32))
        elif name not in inputs:
            width = list(tensor.shape[1:])
            inputs[name] = tf.TensorSpec([None] if width in ([], [1]) else [None, *width], tensor.dtype)
        elif tensor.shape.rank == 3:  # a vector for each of a sample's ids
            inputs[name] = tf.TensorSpec([None, tensor.shape[1]], tf.int64)
    return inputs


def _check(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns unchanged; check that all have the same number of samples and labels are finite."""
    counts = {
        name: column.nrows(tf.int64) if isinstance(column, tf.RaggedTensor) else tf.shape(column, tf.int64)[0]
        for name, column in columns.items()
    }
    first = next(iter(counts.values()))
    found = [part for count in counts.items() for part in count]
    same = tf.reduce_all(tf.equal(tf.stack(list(counts.values())), first))
    said = ["inputs must have equal numbers of samples, but have", *found]
    columns = assert_first(columns, same, said, summarize=2)
    if LABEL not in columns:
        return columns
    finite = tf.math.is_finite(columns[LABEL])
    return assert_first(columns, finite, [f"{LABEL} holds NaN or infinity: leave such samples out"])


def _check_counts(counts: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    samples, total = tf.shape(labels, tf.int64)[0], tf.reduce_sum(counts)
    told = [f"{PER_USER} must be 0 or more and add up to the number of samples,", samples, "not to", total]
    return assert_first(counts, (total == samples) & tf.reduce_all(counts >= 0), told)


def _outputs(model: MetaModel, inputs: Mapping[str, tf.TypeSpec]) -> int:
    """Return how many outputs the network has."""
    sample = {
        name: tf.zeros([1, *(dim or 1 for dim in spec.shape[1:])], spec.dtype)
        for name, spec in inputs.items()
    }
    view = model.learner.view(query_only(sample), model.collection.lookup(sample, insert=False))
    return int(model.learner.task_outputs(view, "query", {}).shape[-1])


# Signatures of an exported `MetaGRM`: predict, adapt to a user, and predict with the user's deltas.


def meta_sequence_signatures(
    model: MetaGRM,
    *,
    steps: int | None = None,
    dtype: DeltaDtype = "float32",
    stale: Stale = "refuse",
    text_ids: bool = True,
    states: RowDtype | None = None,
) -> dict[str, Signature]:
    """Make the signatures of a `GRM` that adapts to users.

    ================  ========================================================  ============================
    signature         inputs                                                    answer
    ================  ========================================================  ============================
    ``predict``       sequences, as for `exposure_signatures`                   as there, by shared weights
    ``adapt``         one user's sequence, its targets the exposures to learn   ``weights_bytes``
                      from, and of each label ``labels_<column>``
    ``adapt_many``    the same of many users                                    ``weights_bytes`` (users,)
    ``predict_with``  one user's sequence, its targets other exposures, and     as of ``predict``, adapted
                      ``weights_bytes``
    ================  ========================================================  ============================

    ``labels_<column>`` are (users, width) float32 like the targets; ``weights_bytes`` is as in
    `meta_signatures`.

    With ``states``, there are also those of `gmeta.export.sequence_models.state_signatures`, and two that
    take a user's state in place of contexts and history, with the same answers up to the rounding of states:

    ================  ========================================================  ============================
    ``adapt_on``      ``state_bytes`` (1,), targets, ``labels_<column>``        ``weights_bytes``
    ``score_with``    ``state_bytes`` (1,), targets, ``weights_bytes``          as of ``predict_with``
    ================  ========================================================  ============================

    Args:
      model: The model, compiled.
      steps: Number of inner steps of ``adapt``; None: ``inner.steps_in("serving")``.
      dtype: The dtype of the deltas that ``adapt`` returns.
      stale: As for `meta_signatures`.
      text_ids: Whether clients send texts for features that hash.
      states: The dtype of states, as for `gmeta.models.UserStates`. None: no signatures of states.

    Raises:
      ConfigError: The model isn't compiled, or a setting has an unknown value; or with ``states``, the ranker
        can't keep them.
    """
    ranker, learner = model.ranker, model.learner
    strings = DeltaStrings(model, steps, dtype, stale)
    wire = PaddedSequences(ranker.columns, model.collection, text_ids)
    labels = {task: f"{LABELS}_{ranker.labels[task]}" for task in learner.labels}

    def adapt(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        batch, here = wire.batch(given)
        deltas, columns = learned(given, batch, _of_one_user(here))
        return {WEIGHTS: strings.encode(deltas, columns)}

    def adapt_many(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        return {WEIGHTS: strings.encode_many(learned(given, *wire.batch(given))[0])}

    def learned(
        given: dict[str, Any], batch: Mapping[str, Any], here: tf.Tensor
    ) -> tuple[TaskDeltas, dict[str, tf.Tensor]]:
        columns = {name: _labels(given[name], name, here) for name in labels.values()}
        task = _tasks(model, batch, tf.stack(list(columns.values()), axis=-1), "support", _counts(here))
        return task_deltas(learner, task, strings.steps), columns

    def predict_with(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        deltas, rows = strings.decode(given[WEIGHTS])
        batch, here = wire.batch(given)
        here = _of_one_user(here)
        exposures = tf.math.count_nonzero(here)
        none = tf.zeros([exposures, len(labels)])
        task = _tasks(model, batch, none, "query", _counts(here))
        towers = query_outputs(learner, task, deltas, rows)[0]
        return answers(ranker, batch, learner.by_task(towers), here)

    of_labels = {name: tf.TensorSpec([None, None], tf.float32) for name in labels.values()}
    of_weights = {WEIGHTS: tf.TensorSpec([], tf.string)}
    found = {
        **exposure_signatures(ranker, text_ids=text_ids),
        "adapt": Signature(adapt, {**wire.inputs, **of_labels}),
        "adapt_many": Signature(adapt_many, {**wire.inputs, **of_labels}),
        "predict_with": Signature(predict_with, {**wire.inputs, **of_weights}),
    }
    if states is None:
        return found
    kept = UserStates(ranker, states, stale=stale)
    digest = Derived("trunk_digest", kept.digest)

    def adapt_on(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        batch, here = wire.batch(given, ("targets",))
        here = _of_one_user(here)
        columns = {name: _labels(given[name], name, here) for name in labels.values()}
        hidden, _ = kept.hidden(given[STATE], wire.with_scenario(batch, given), digest()[0])
        shown = tf.stack(list(columns.values()), axis=-1)
        task = _task_of(model, hidden, shown, "support")
        return {WEIGHTS: strings.encode(task_deltas(learner, task, strings.steps), columns)}

    def score_with(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        deltas, rows = strings.decode(given[WEIGHTS])
        batch, here = wire.batch(given, ("targets",))
        here = _of_one_user(here)
        hidden, _ = kept.hidden(given[STATE], wire.with_scenario(batch, given), digest()[0])
        task = _task_of(model, hidden, tf.zeros([tf.shape(hidden)[0], len(labels)]), "query")
        towers = query_outputs(learner, task, deltas, rows)[0]
        return answers(ranker, None, learner.by_task(towers), here)

    given = {STATE: tf.TensorSpec([None], tf.string), **wire.inputs_of("targets"), **wire.scenario}
    return {
        **found,
        **state_signatures(ranker, dtype=states, stale=stale, text_ids=text_ids),
        "adapt_on": Signature(adapt_on, {**given, **of_labels}),
        "score_with": Signature(score_with, {**given, **of_weights}),
    }


def _tasks(
    model: MetaGRM, batch: Mapping[str, Any], labels: tf.Tensor, part: str, counts: tf.Tensor
) -> dict[str, Any]:
    """Make a task of each user, with all exposures in one part, support or query."""
    tasks = tasks_in(part, model.ranker.ids(batch), labels, counts)
    return {**tasks, "layout": model.learner.columns.layout(batch)}


def _task_of(model: MetaGRM, exposures: tf.Tensor, labels: tf.Tensor, part: str) -> dict[str, Any]:
    """Make a task of one user as `_tasks` does, of the trunk's vectors (exposures, dim)."""
    counts = tf.shape(labels, tf.int64)[:1]
    return {**tasks_in(part, no_ids(model.collection), labels, counts), "exposures": exposures}


def _counts(here: tf.Tensor) -> tf.Tensor:
    """Return the number of each user's exposures."""
    return tf.math.count_nonzero(here, axis=1)


def _of_one_user(here: tf.Tensor) -> tf.Tensor:
    users = tf.shape(here)[0]
    told = ["adapting takes one user per request, but the number of samples of inputs is", users]
    return assert_first(here, users == 1, told)


def _labels(given: tf.Tensor, name: str, here: tf.Tensor) -> tf.Tensor:
    """Return the labels of the exposures, (exposures,)."""
    told = [f"{name} must have the shape of the targets, but the shapes are"]
    alike = tf.reduce_all(tf.shape(given) == tf.shape(here))
    found = tf.boolean_mask(assert_first(given, alike, [*told, tf.shape(given), tf.shape(here)]), here)
    finite = tf.math.is_finite(found)
    return assert_first(found, finite, [f"{name} holds NaN or infinity: leave such exposures out"])
