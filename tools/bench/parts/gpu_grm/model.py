"""The GRM of the benchmark, whose rows are looked up in each of the ways that MTGenRec compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gmeta
from gmeta.core import collectives
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, MMoE
from gmeta.layers.exchange.fetch import Fetch, Owned, Requested
from gmeta.layers.exchange.pieces import send_keys
from gmeta.layers.task_heads import TaskHeads
from gmeta.models import GRM
from gmeta.ops.table.read_ahead import Peeked
from gmeta.optimizers import Adam

import tensorflow as tf
from parts.gpu_grm.data import CONTEXTS, EVENT, SHOWN

WIDTHS = {"user": 64, "city": 64, "item": 128, "shop": 128, "category": 64, "action": 64}
"""Widths of embeddings: those of the paper's "1D" are 32 to 128."""
TASKS, EXPERTS, CHOSEN = ("ctr", "cvr"), 4, 2
_HORIZON = 3600.0  # as in `gmeta.models.GRM.of`


class EveryKey(Fetch):
    """Lookups without deduplication: a key is sent, and read, as often as a batch has it."""

    def request(self, keys: Sequence[tf.Tensor], samples: tf.Tensor | int = 0) -> Requested:
        """Send all keys to their owners."""
        if collectives.world().size == 1:
            every = tuple(tf.range(tf.size(each)) for each in keys)
            return Requested(tuple(keys), every, None, distinct=False)
        sent = send_keys(keys, samples=samples, dedup=False, device=self.place, name=self.name)
        return Requested(sent.routed.keys, sent.routed.inverse, sent)

    def look_up(
        self, requested: Owned, insert: bool | tf.Tensor, peeked: Sequence[Peeked] | None = None
    ) -> tuple[tf.Tensor, ...]:
        """Read the row of each key; keys may repeat."""
        if peeked is not None:
            raise ValueError("rows that were read ahead are of distinct keys")
        asked = zip(self.tables, requested.owned, strict=True)
        return tuple(table.lookup_keys(keys, insert) for table, keys in asked)


class EachAlone(tf.keras.layers.Layer):
    """Features whose tables aren't merged: each has its own table and lookup, with its own exchanges."""

    def __init__(self, features: Sequence[FeatureConfig], **settings: Any) -> None:
        super().__init__(name="each_alone")
        self.features = tuple(features)
        self.parts = [
            EmbeddingCollection([each], name=f"embeddings_{each.name}", **settings) for each in features
        ]

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> dict[str, Any]:
        """Look up all features: feature -> vectors."""
        return {name: v for part in self.parts for name, v in part(inputs, training=training).items()}


def new_model(settings: Mapping[str, Any], *, merge: bool, dedup: bool, depth: int) -> GRM:
    """Make and compile a model; its initial weights are the same each time.

    Args:
      settings: ``dim``, ``blocks``, ``heads`` and ``longest``.
      merge: Whether features of equal width share a physical table, and all features a lookup.
      dedup: Whether keys are deduplicated, at the sender and at the owner.
      depth: The pipeline's depth; 0: none.
    """
    dim, heads = settings["dim"], settings["heads"]
    features = [FeatureConfig(name, dim=width) for name, width in WIDTHS.items()]
    kind = EmbeddingCollection if merge else EachAlone
    collection = kind(features, optimizer=Adam(1e-3), seed=1)
    for part in [collection] if merge else collection.parts:
        if not dedup:
            part.fetch = EveryKey(part.tables, part.fetch.wire_dtype, part.name)
    model = GRM(
        collection,
        HSTU(
            blocks=settings["blocks"],
            heads=heads,
            attention_dim=dim // heads,
            value_dim=dim // heads,
            max_length=settings["longest"],
            bias_by_place=False,  # the model rejects it: scores would depend on earlier exposures
            bias_by_time=True,
            horizon=_HORIZON,
            seed=1,
        ),
        MMoE(TASKS, experts=EXPERTS, units=[dim], top_k=CHOSEN, report=None, seed=1, name="mixture"),
        TaskHeads(TASKS, units=[dim // 2], products={"ctcvr": TASKS}, seed=1, name="heads"),
        contexts=CONTEXTS,
        history=EVENT,
        targets=SHOWN,
        labels={"ctr": "click", "ctcvr": "buy"},
        time="time",
        dim=dim,
    )
    model.compile(tf.keras.optimizers.Adam(1e-4), pipeline=gmeta.Pipeline(depth))
    return model
