"""The signature of exported generative retrievers."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.errors import ConfigError
from gmeta.export.sequence_models import UNKNOWN, histories, history_inputs, most_popular
from gmeta.export.signature import Signature
from gmeta.models import FlatRetriever, GenerativeRetriever


def retrieval_signatures(
    model: GenerativeRetriever | FlatRetriever,
    *,
    k: int | None = None,
    beam: int | None = None,
    allow: Any = None,
    leave_out_seen: bool = False,
    text_ids: bool = True,
) -> dict[str, Signature]:
    """Make the signature ``retrieve`` of a generative retriever.

    It takes histories, the item's column and the time's if the model has one, and answers with ``items``
    (samples, k), ids of the likeliest first, ``scores`` (samples, k), logs of their probabilities, and
    ``unknown_history`` (samples,) int64, how many items of a history aren't in the catalogue. The
    search is in TensorFlow's own ops; the rows of all items, if the model has any, are a weight of the
    exported model. Histories are matrices (samples, width) in the order of time, padded with -1 or with the
    empty text.

    Args:
      model: The model, of either form.
      k: How many items the answer has. None: 10, or the whole catalogue if it has fewer.
      beam: How many prefixes are kept at each digit. None: the model's.
      allow: bool (V,), which items may come out; None: all.
      leave_out_seen: Whether to leave out the items of the history, as far as the model reads it. Where fewer
        than k items are found, the other places hold -1 or the empty text, with score -inf.
      text_ids: Whether clients send texts if the feature hashes.

    Raises:
      ConfigError: ``beam`` is below k, or k above the number of items.
    """
    k = min(10, model.items) if k is None else whole_number("k", k, least=1)
    if k > model.items:
        raise ConfigError(f"k must be at most {model.items}, the catalogue's size, got {k}")
    if (beam := model.beam if beam is None else whole_number("beam", beam, least=1)) < k:
        raise ConfigError(f"beam must be at least {k}, the items wanted, got {beam}")
    inputs = history_inputs(model, text_ids)

    @functools.cache
    def rows() -> tf.Variable:
        with tf.init_scope():
            return tf.Variable(model.item_rows(), trainable=False, name="item_rows")

    def retrieve(given: dict[str, Any]) -> dict[str, tf.Tensor]:
        search = model.retrieve
        if isinstance(model, GenerativeRetriever):
            search = functools.partial(model.retrieve, rows=tf.convert_to_tensor(rows()))
        x = histories(inputs, model.item, given)
        popular = most_popular(model, k, allow)
        items, scores = search(x, k, beam=beam, allow=allow, leave_out_seen=leave_out_seen, popular=popular)
        return {"items": items, "scores": scores, UNKNOWN: model.unknown_history(x)}

    return {"retrieve": Signature(retrieve, inputs)}
