"""The semantic ids of a file's items: of their neighbours in training, attributes, or a trained model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from histories import LeaveLastOut
from retriever_settings import RetrieverSettings
from sequences import read_attributes

from gmeta.core.errors import ConfigError
from gmeta.preprocess import SemanticIds, cooccurrence_vectors, semantic_ids

SOURCES = ("attributes", "cooccurrence", "items", "random")


def make_ids(data: LeaveLastOut, file: Path, settings: RetrieverSettings, seed: int) -> SemanticIds:
    """Make the ids of a catalogue. Of histories only what models are trained on is read.

    Args:
      data: The histories.
      file: Their file, beside which the attributes are.
      settings: ``ids`` names the source. ``"random"``: the codes of ``"attributes"``, each of another item,
        so that they have the same shape and say nothing.
      seed: Of SVD, clusters and the shuffle.

    Raises:
      ConfigError: There is no such source.
    """
    if settings.ids not in SOURCES:
        raise ConfigError(f"ids must be one of {', '.join(SOURCES)}, got {settings.ids!r}")
    if settings.ids == "items":
        vectors = train_item_vectors(data, settings, seed)
    else:
        vectors = cooccurrence_vectors(
            data.train["item"].to_list(),
            data.items,
            dim=settings.vectors,
            attributes=None if settings.ids == "cooccurrence" else read_attributes(file),
            seed=seed,
        )
    ids = semantic_ids(
        vectors, levels=settings.levels, codes=settings.codes, balanced=settings.balanced, seed=seed
    )
    if settings.ids == "random":
        return replace(ids, digits=np.random.default_rng(seed).permutation(ids.digits))
    return ids


def train_item_vectors(data: LeaveLastOut, settings: RetrieverSettings, seed: int) -> np.ndarray:
    """Train the recipe of the next item on the same histories, and return its items' vectors, (V, d)."""
    from histories import batches
    from settings import OF_SEQUENCES, Settings, make_model

    own = Settings(dim=settings.dim, max_length=settings.max_length, batch=settings.batch)
    model = make_model("sasrec", OF_SEQUENCES, data.items, own, seed)
    model.fit(batches(data.train, own.batch, shuffle=seed), epochs=settings.item_epochs, verbose=0)
    return np.asarray(model.item_vectors())
