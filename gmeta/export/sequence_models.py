"""Signatures of exported models over sequences: they recommend next items, rank exposures, or keep states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.graph import assert_first
from gmeta.core.row_formats import RowDtype
from gmeta.export.derived import Derived, most_popular, of_items
from gmeta.export.signature import (
    PaddedSequences,
    Signature,
    as_matrix,
    feature_inputs,
    histories,
    history_inputs,
    id_spec,
)
from gmeta.models import GRM, FlatRetriever, GenerativeRetriever, NextItemModel, TwoTower
from gmeta.models.sequence.history_model import HistoryModel
from gmeta.models.sequence.state_format import Stale
from gmeta.models.sequence.user_states import HistoryStates, UserStates

LABELS = "labels"
UNKNOWN = "unknown_history"
"""The name of the answer that counts the items or ids of a history that the model has never seen."""
LEAVE_OUT = "leave_out"
"""The name of the input of further items that the answer must not have."""


def next_item_signatures(
    model: NextItemModel,
    *,
    k: int | None = None,
    leave_out_seen: bool = False,
    leave_out: bool = False,
    allow: Any = None,
    text_ids: bool = True,
    states: RowDtype | None = None,
    stale: Stale = "refuse",
    checksums: bool = False,
) -> dict[str, Signature]:
    """Make the signatures of a next-item model.

    =============  ==========================================  ==========================================
    signature      inputs                                      answer
    =============  ==========================================  ==========================================
    ``recommend``  histories: the item's column, and the       ``items`` (samples, k) ids, the likeliest
                   time's if the model has one                 first, ``scores`` (samples, k), and
                                                               ``unknown_history`` (samples,)
    ``query``      the same                                    ``query`` (samples, d), as `predict` gives
    =============  ==========================================  ==========================================

    Histories are matrices (samples, width) in the order of time, padded with -1 or with the empty text. The
    catalogue's vectors, and the answer to a history without items, are computed at export, and again by
    deltas (`gmeta.export.derived`). Answers hold ids as in the model's ``items=``. ``unknown_history`` is
    int64: how many items in the part of a history that the model reads aren't in the catalogue. The model
    reads the initial row for them.

    With ``states``, there are more, which keep what was read of a user
    (`gmeta.models.sequence.user_states.HistoryStates`):

    ================  =======================================  ===========================================
    signature         inputs                                   answer
    ================  =======================================  ===========================================
    ``read``          histories                                ``state_bytes`` and ``unknown_history``
    ``read_on``       ``state_bytes``, and the new items as    ``state_bytes``, and ``unknown_history`` of
                      histories                                the new items
    ``recommend_on``  ``state_bytes``                          as ``recommend``, without
                                                               ``unknown_history``
    ``state_info``    ``state_bytes``                          ``items``: how many the state holds, ``time``
                                                               of the last one (if the model reads times),
                                                               ``checksum``
    ================  =======================================  ===========================================

    Args:
      model: The model.
      k: How many items the answer has. None: 10, or the whole catalogue if it has fewer.
      leave_out_seen: Whether to leave out the items in the part of the history that the model reads. If fewer
        than k items remain, the other places hold -1 or the empty text, with score -inf.
      leave_out: Whether ``recommend`` takes ``leave_out`` too, a matrix (samples, another width) of ids like
        histories: items that the answer must not have, such as blocked ones. Ids that the catalogue lacks
        have no effect.
      allow: bool (V,), which items are allowed, such as those in stock, in the order of the catalogue. None:
        all. The exported model holds the mask.
      text_ids: Whether clients send texts if the feature hashes.
      states: The dtype of states; None: no signatures of states.
      stale: As for `state_signatures`.
      checksums: As there.

    Raises:
      ConfigError: The catalogue has fewer than k items, a column is ``leave_out``, the mask doesn't fit, or
        states are wanted and the model can't keep them.

    Example:
      ::

        signatures = next_item_signatures(model, k=50, leave_out=True, allow=np.isin(items, in_stock))
        export_model(model, "serving/next/2", signatures=signatures)
    """
    k = _top(model, k)
    inputs = history_inputs(model, text_ids)
    further, allow = _filters(model, inputs, leave_out, allow, text_ids)
    alone = type(model) is NextItemModel  # the vectors of a subclass may have matrix products
    vectors = of_items("item_vectors", model, model.item_vectors, alone=alone)
    popular = most_popular(model, model.items if leave_out else k, allow)
    kept = _kept(model, states, stale, checksums)

    def recommend(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        x = histories(inputs, model.item, given)
        filters = {"leave_out_seen": leave_out_seen, "leave_out": given.get(LEAVE_OUT), "allow": allow}
        items, scores = model.recommend(x, k, **filters, vectors=vectors()[0], popular=popular())
        return {"items": items, "scores": scores, UNKNOWN: model.unknown_history(x)}

    def query(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        return {"query": model(histories(inputs, model.item, given), training=False)}

    found = {"recommend": Signature(recommend, {**inputs, **further}), "query": Signature(query, inputs)}
    if kept is None:
        return found

    def recommend_on(given: dict[str, Any], digest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        filters = {"leave_out_seen": leave_out_seen, "leave_out": given.get(LEAVE_OUT), "allow": allow}
        known = {"vectors": vectors()[0], "popular": popular()}
        return kept.recommend(given[STATE], k, digest=digest, **filters, **known)

    return {**found, **_of_histories(kept, inputs, {"recommend_on": recommend_on}, further, checksums)}


def two_tower_signatures(
    model: TwoTower,
    *,
    k: int | None = None,
    leave_out_seen: bool = True,
    leave_out: bool = False,
    allow: Any = None,
    text_ids: bool = True,
) -> dict[str, Signature]:
    """Make the signatures of a two-tower model.

    They are ``recommend`` and ``query``, with the answers of `next_item_signatures` except
    ``unknown_history``. Inputs are the item's column, a matrix (samples, width) padded with -1 or with the
    empty text, and the columns of users. The catalogue's vectors are computed at export, and again by deltas
    (`gmeta.export.derived`).

    Args:
      model: The model.
      k: How many items the answer has. None: 10, or the whole catalogue if it has fewer.
      leave_out_seen: Whether to leave out the items of the history.
      leave_out: Whether ``recommend`` takes ``leave_out`` too, as there.
      allow: bool (V,), which items are allowed, as there.
      text_ids: Whether clients send texts if a feature hashes.

    Raises:
      ConfigError: As there.
    """
    k = _top(model, k)
    columns = [each for each in model.collection.features if each.name in model.user_columns]
    item = {model.item: id_spec(model.feature, text_ids, matrix=True)}
    inputs: dict[str, tf.TypeSpec] = {**item, **feature_inputs(columns)}
    further, allow = _filters(model, inputs, leave_out, allow, text_ids)
    vectors = of_items("item_vectors", model, model.item_vectors, alone=not model.hidden)

    def batch(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, **histories(item, model.item, given)}

    def recommend(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        left = given.get(LEAVE_OUT)
        x = batch({name: given[name] for name in inputs})
        filters = {"leave_out_seen": leave_out_seen, "leave_out": left, "allow": allow}
        items, scores = model.recommend(x, k, **filters, vectors=vectors()[0])
        return {"items": items, "scores": scores}

    def query(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        return {"query": model(batch(given), training=False)}

    return {"recommend": Signature(recommend, {**inputs, **further}), "query": Signature(query, inputs)}


def _top(model: HistoryModel, k: int | None) -> int:
    """Return how many items an answer has."""
    k = min(10, model.items) if k is None else whole_number("k", k, least=1)
    if k > model.items:
        raise ConfigError(f"k must be at most {model.items}, the catalogue's size, got {k}")
    return k


def _filters(
    model: HistoryModel, inputs: Mapping[str, Any], leave_out: bool, allow: Any, text_ids: bool
) -> tuple[dict[str, tf.TypeSpec], Any]:
    """Return the input of items to leave out, if there is one, and the mask of allowed items as an array."""
    mask = None if allow is None else np.asarray(model.catalogue.mask(allow))
    if leave_out and LEAVE_OUT in inputs:
        raise ConfigError(
            f"{model.name} has a column {LEAVE_OUT!r} already: rename it, or use leave_out=False"
        )
    return {LEAVE_OUT: id_spec(model.feature, text_ids, matrix=True)} if leave_out else {}, mask


def exposure_signatures(model: GRM, *, text_ids: bool = True) -> dict[str, Signature]:
    """Make the signature ``predict`` of a model that ranks exposures.

    Inputs are those of `gmeta.export.signature.PaddedSequences`. For each label, named by its column, the
    answer has the exposures' probability and ``<label>_logit``. A task or product without a label has both
    too, under the task's or product's name. All are (samples, width) like the columns of targets, and 0 where
    those columns are padded. ``unknown_history`` (samples,) int64 is how many ids in the columns of a history
    have no row, because training never saw them.

    Args:
      model: The model.
      text_ids: Whether clients send texts for features that hash.

    Raises:
      ConfigError: A label has the name ``unknown_history``.
    """
    wire = PaddedSequences(model.columns, model.collection, text_ids)

    def predict(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        batch, here = wire.batch(given)
        return answers(model, batch, model.logits(batch, training=False)[0], here)

    return {"predict": Signature(predict, wire.inputs)}


def answers(
    model: GRM, batch: Mapping[str, Any] | None, logits: Mapping[str, tf.Tensor], here: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Arrange the answers for exposures.

    Args:
      model: The model that names the answers.
      batch: The batch; None: the request has no history, whose unknown ids could be counted.
      logits: Task or product -> (exposures,).
      here: (samples, width), true where the targets hold an exposure.
    """
    names = {task: model.labels.get(task, task) for task in logits}
    if len(set(names.values())) < len(names):  # tasks that share a label
        names = {task: task for task in logits}
    if UNKNOWN in names.values():
        raise ConfigError(f"{model.name}: a label can't have the name {UNKNOWN!r}, which another answer has")
    found = {} if batch is None else {UNKNOWN: model.unknown_history(batch)}
    for task, logit in logits.items():
        found[names[task]] = as_matrix(tf.sigmoid(logit), here)
        found[f"{names[task]}_logit"] = as_matrix(logit, here)
    return found


# Signatures that read a user's history once, and score candidates against what was kept of it.

STATE = "state_bytes"
"""The name of a user's state on the wire. Over REST, values whose name ends so are base64."""
CHECKSUM = "checksum"


def state_signatures(
    model: GRM,
    *,
    dtype: RowDtype = "bfloat16",
    stale: Stale = "refuse",
    checksums: bool = False,
    at_once: int = 256,
    text_ids: bool = True,
) -> dict[str, Signature]:
    """Make the signatures that read a user's history once, and then score candidates against its state.

    ==============  =========================================  ===============================================
    signature       inputs                                     answer
    ==============  =========================================  ===============================================
    ``read``        contexts and history                       ``state_bytes`` and ``unknown_history``
    ``read_on``     ``state_bytes``, and as history the new    ``state_bytes``, and ``unknown_history`` of the
                    events                                     new events
    ``score``       ``state_bytes`` and targets                as ``predict``, without ``unknown_history``
    ``state_info``  ``state_bytes``                            ``tokens``, ``time`` of the last event (if the
                                                               model reads times), ``checksum``
    ==============  =========================================  ===============================================

    Columns are those of `gmeta.export.signature.PaddedSequences`; a scenario among the contexts is an
    input of ``score`` too. ``state_bytes`` (samples,) string is a state of `gmeta.models.UserStates`: clients
    store it and send it unchanged. The answer of ``score`` equals that of ``predict`` up to the rounding of
    ``dtype``.

    Add them to those of `gmeta.export.exposure_signatures`.

    Args:
      model: The model.
      dtype: As for `gmeta.models.UserStates`.
      stale: What ``score`` and ``read_on`` do with states that other dense weights have read, such as those
        of the version that was served before: ``"refuse"``, so that clients read the history again, or
        ``"apply"``.
      checksums: Whether ``read`` and ``read_on`` take ``checksum``, (samples,) int64, which states hold: that
        of the history in its store (`gmeta.io.RecentHistories`), by which a client sees that a state is
        behind.
      at_once: As for `gmeta.models.UserStates`.
      text_ids: Whether clients send texts for features that hash.

    Raises:
      ConfigError: The model can't keep states (`gmeta.models.UserStates`), or a setting is unknown.

    Example:
      ::

        signatures = {**exposure_signatures(model), **state_signatures(model)}
        export_model(model, "serving/1", signatures=signatures)
    """
    states = UserStates(model, dtype, stale=stale, at_once=at_once)
    wire = PaddedSequences(model.columns, model.collection, text_ids)
    digest = Derived("trunk_digest", states.digest)

    def score(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        batch, here = wire.batch(given, ("targets",))
        former = _alike(given[STATE], STATE, here)
        logits, _ = states.logits(former, wire.with_scenario(batch, given), digest()[0])
        return answers(model, None, logits, here)

    whole = (lambda given: wire.batch(given, ("contexts", "history")), wire.inputs_of("contexts", "history"))
    new = (lambda given: wire.batch(given, ("history",)), wire.inputs_of("history"))
    return {
        **_reading(states, digest, whole, new, checksums),
        "score": Signature(score, {STATE: _STATES, **wire.inputs_of("targets"), **wire.scenario}),
    }


_STATES = tf.TensorSpec([None], tf.string)
_Wire = tuple[Callable[[dict[str, Any]], tuple[Any, tf.Tensor]], Mapping[str, tf.TypeSpec]]
"""Makes the batch of inputs, and returns a tensor with a row a sample; and the inputs."""


def _reading(
    states: UserStates | HistoryStates, digest: Derived, whole: _Wire, new: _Wire, checksums: bool
) -> dict[str, Signature]:
    """Make ``read``, ``read_on`` and ``state_info``.

    Args:
      states: What reads.
      digest: Of the weights that do.
      whole: The inputs of ``read``.
      new: Those of ``read_on``, besides states.
      checksums: Whether both take ``checksum``.
    """
    checked: dict[str, tf.TypeSpec] = {CHECKSUM: tf.TensorSpec([None], tf.int64)} if checksums else {}

    def checksum_of(given: dict[str, Any], here: tf.Tensor) -> tf.Tensor | None:
        return _alike(given[CHECKSUM], CHECKSUM, here) if checksums else None

    def read(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        batch, here = whole[0](given)
        state = states.read(batch, checksum_of(given, here), digest()[0])
        return {STATE: state, UNKNOWN: states.model.unknown_history(batch)}

    def read_on(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        batch, here = new[0](given)
        former = _alike(given[STATE], STATE, here)
        state = states.read_on(former, batch, checksum_of(given, here), digest()[0])
        return {STATE: state, UNKNOWN: states.model.unknown_history(batch)}

    return {
        "read": Signature(read, {**whole[1], **checked}),
        "read_on": Signature(read_on, {STATE: _STATES, **new[1], **checked}),
        "state_info": Signature(lambda given: states.about(given[STATE]), {STATE: _STATES}),
    }


def _kept(model: HistoryModel, dtype: RowDtype | None, stale: Stale, checksums: bool) -> HistoryStates | None:
    """Return what keeps states of histories, if their dtype is given."""
    if dtype is not None:
        return HistoryStates(model, dtype, stale=stale)
    if stale != "refuse" or checksums:
        raise ConfigError("stale= and checksums= are settings of states: give their dtype, states='bfloat16'")
    return None


def _of_histories(
    kept: HistoryStates,
    inputs: Mapping[str, tf.TypeSpec],
    asked: Mapping[str, Callable[[dict[str, Any], tf.Tensor], tuple[tf.Tensor, tf.Tensor]]],
    further: Mapping[str, tf.TypeSpec],
    checksums: bool,
) -> dict[str, Signature]:
    """Make the signatures of states of histories.

    Args:
      kept: The states.
      inputs: The columns of histories.
      asked: Name of a signature -> maps its inputs and the digest of the weights to items and scores.
      further: The inputs of these besides states.
      checksums: Whether the states hold checksums that clients send.
    """
    digest, item = Derived("trunk_digest", kept.digest), kept.model.item
    wire = (lambda given: (histories(inputs, item, given), given[item]), inputs)

    def answer(name: str, given: dict[str, Any]) -> dict[str, tf.Tensor]:
        items, scores = asked[name](given, digest()[0])
        return {"items": items, "scores": scores}

    taken = {STATE: _STATES, **further}
    found = {name: Signature(functools.partial(answer, name), taken) for name in asked}
    return {**_reading(kept, digest, wire, wire, checksums), **found}


def _alike(given: tf.Tensor, name: str, here: tf.Tensor) -> tf.Tensor:
    users, own = tf.shape(here)[0], tf.size(given)
    return assert_first(given, own == users, [f"{name}: one a sample expected; samples", users, "given", own])


# The signature of exported generative retrievers.


def retrieval_signatures(
    model: GenerativeRetriever | FlatRetriever,
    *,
    k: int | None = None,
    beam: int | None = None,
    allow: Any = None,
    leave_out_seen: bool = False,
    leave_out: bool = False,
    text_ids: bool = True,
    states: RowDtype | None = None,
    stale: Stale = "refuse",
    checksums: bool = False,
) -> dict[str, Signature]:
    """Make the signature ``retrieve`` of a generative retriever.

    It takes histories, the item's column and the time's if the model has one, and returns ``items``
    (samples, k), ids, the likeliest first, ``scores`` (samples, k), logs of their probabilities, and
    ``unknown_history`` (samples,) int64, how many items of a history aren't in the catalogue. TensorFlow ops
    compute the search; the rows of all items, if the model has any, are a weight of the exported model,
    which deltas compute again (`gmeta.export.derived`).
    Histories are matrices (samples, width) in the order of time, padded with -1 or with the empty text.

    With ``states``, there are the signatures of states of `next_item_signatures` too, with ``retrieve_on`` in
    place of ``recommend_on``.

    Args:
      model: The model, of either form.
      k: How many items the answer has. None: 10, or the whole catalogue if it has fewer.
      beam: How many prefixes are kept at each digit. None: the model's.
      allow: bool (V,), which items are allowed; None: all.
      leave_out_seen: Whether to leave out the items in the part of the history that the model reads. Where
        fewer than k items are found, the other places hold -1 or the empty text, with score -inf.
      leave_out: Whether ``retrieve`` takes ``leave_out`` too, as in `next_item_signatures`.
      text_ids: Whether clients send texts if the feature hashes.
      states: As for `next_item_signatures`.
      stale: As there.
      checksums: As there.

    Raises:
      ConfigError: ``beam`` is below k, or k above the number of items; or states are wanted, and the model
        can't keep them.
    """
    k = _top(model, k)
    if (beam := model.beam if beam is None else whole_number("beam", beam, least=1)) < k:
        raise ConfigError(f"beam must be at least {k}, the items wanted, got {beam}")
    inputs = history_inputs(model, text_ids)
    further, allow = _filters(model, inputs, leave_out, allow, text_ids)
    popular = most_popular(model, model.items if leave_out else k, allow)
    kept = _kept(model, states, stale, checksums)
    rows = None
    if isinstance(model, GenerativeRetriever):
        rows = of_items("item_rows", model, model.item_rows, alone=True)

    def settings(given: dict[str, Any]) -> dict[str, Any]:
        of_rows = {} if rows is None else {"rows": rows()[0]}
        filters = {"leave_out_seen": leave_out_seen, "leave_out": given.get(LEAVE_OUT), "allow": allow}
        return {"beam": beam, **filters, **of_rows, "popular": popular()}

    def retrieve(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        x = histories(inputs, model.item, given)
        items, scores = model.retrieve(x, k, **settings(given))
        return {"items": items, "scores": scores, UNKNOWN: model.unknown_history(x)}

    found = {"retrieve": Signature(retrieve, {**inputs, **further})}
    if kept is None:
        return found

    def retrieve_on(given: dict[str, Any], digest: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return kept.retrieve(given[STATE], k, digest=digest, **settings(given))

    return {**found, **_of_histories(kept, inputs, {"retrieve_on": retrieve_on}, further, checksums)}
