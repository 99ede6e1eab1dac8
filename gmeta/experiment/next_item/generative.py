"""A generative model of the next item: its semantic ids, how it is built, and its search as scores.

A training run's folder has its semantic ids in ``ids``. They are made once, from the training part of the
histories alone, and training, resumed training, measurement and export read the same ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.checkpoint.store import CheckpointStore
from gmeta.core.collectives.rank_group import Ranks
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import stage_folder
from gmeta.core.json_values import parse_json
from gmeta.core.semantic_ids import SemanticIds
from gmeta.experiment.next_item.counting import Scorer, Scores
from gmeta.experiment.next_item.histories import Cuts, Histories
from gmeta.experiment.plan.generative_config import SOURCES, GenerativeMethod
from gmeta.experiment.plan.next_item_config import CatalogueConfig
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import FlatRetriever, GenerativeRetriever
from gmeta.optimizers import AdamW

_BETA_2 = 0.98
_BEAMS = 12_800  # searched at once

# Semantic ids.


def attributes_of(method: GenerativeMethod, cuts: Cuts) -> list[str]:
    """Return the columns of items that semantic ids are made from, in the data's order; empty if none.

    Raises:
      ConfigError: The method names a column that isn't one of items.
    """
    if not method.reads_attributes or cuts.columns is None:
        return []
    known = [*cuts.columns.items.columns]
    wanted = known if method.attributes is None else method.attributes
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(
            f"method {method.label!r}: attributes names {', '.join(unknown)}, which aren't the same in all "
            f"rows of an item, or say nothing; the columns of items are {', '.join(known) or 'none'}"
        )
    return [name for name in known if name in wanted]


def make_ids(method: GenerativeMethod, seed: int, cuts: Cuts, item_vectors: Callable[[], Any]) -> SemanticIds:
    """Make the semantic ids of the catalogue. Only the training part of histories is read.

    Args:
      method: The source and the size of the ids.
      seed: The seed of the SVD, of clusters and of the shuffle.
      cuts: The data, with columns of items if ids are made from them.
      item_vectors: Returns vectors (items, any width), for ``ids = "items"``.

    Raises:
      ConfigError: There is no such source.
      DataError: A folder has no ids, or lacks those of some items.
    """
    if not method.makes_ids:
        return _read_given(method, cuts)
    from gmeta.preprocess import cooccurrence_vectors, semantic_ids  # loads the code that prepares data

    if method.ids == "items":
        vectors = item_vectors()
    else:
        vectors = cooccurrence_vectors(
            np.split(cuts.train.items, cuts.train.row_splits[1:-1]),
            cuts.items,
            min(method.id_dim or 0, cuts.items - 1),
            attributes=_values_of_items(method, cuts),
            seed=seed,
        )
    assert method.levels is not None  # `GenerativeMethod.complete` sets them
    assert method.codes is not None
    found = semantic_ids(
        vectors,
        method.levels,
        method.codes,
        items=cuts.ids,
        balanced=bool(method.balanced),
        seed=seed,
    )
    if method.ids == "random":
        return replace(found, digits=np.random.default_rng(seed).permutation(found.digits))
    return found


def _values_of_items(method: GenerativeMethod, cuts: Cuts) -> dict[int, list[int]] | None:
    if not method.attributes:
        return None
    assert cuts.columns is not None  # or else `attributes_of` found none
    values, splits = cuts.columns.items.choose(method.attributes, cuts.ids)
    return dict(enumerate(each.tolist() for each in np.split(values, splits[1:-1])))


def _read_given(method: GenerativeMethod, cuts: Cuts) -> SemanticIds:
    """Return the ids of the catalogue from a folder of `gmeta semantic-ids`, which may have more items."""
    folder = _given_folder(method)
    given = SemanticIds.read(folder)
    order = np.argsort(given.items)
    place = order[np.minimum(np.searchsorted(given.items, cuts.ids, sorter=order), len(order) - 1)]
    absent = cuts.ids[given.items[place] != cuts.ids]
    if len(absent):
        raise DataError(
            f"it has no semantic ids of {len(absent):,} of {cuts.items:,} items, such as {absent[0]}",
            path=folder,
            advice="make them of all items of the training data with `gmeta semantic-ids`",
        )
    return replace(given, items=given.items[place], digits=given.digits[place])


def _given_folder(method: GenerativeMethod) -> Path:
    folder = Path(str(method.ids))
    if not folder.is_dir():
        raise ConfigError(
            f"method {method.label!r}: ids must be one of {', '.join(SOURCES)}, or a folder of ids, got "
            f"{method.ids!r}"
        )
    return folder


_MADE = "made.json"


def keep_ids(
    method: GenerativeMethod,
    seed: int,
    cuts: Cuts,
    folder: Path,
    item_vectors: Callable[[], Any],
) -> None:
    """Make the semantic ids of a training run and store them in its folder, unless it has them.

    All ranks of a job call it together; rank 0 makes them.

    Raises:
      ConfigError: As for `make_ids`.
      DataError: As for `make_ids`; or training started with ids that no longer exist.
    """
    ranks = Ranks.of()

    def are_there() -> bool:
        there = (folder / "ids").exists()
        if not there and CheckpointStore(folder).latest() is not None:
            raise DataError("its semantic ids are gone", path=folder / "ids", advice=_AGAIN)
        return there

    if not ranks.from_first(are_there):
        vectors = item_vectors() if method.ids == "items" else None  # all ranks train these together
        with ranks.together():
            if ranks.rank == 0:
                found = make_ids(method, seed, cuts, lambda: vectors)
                with stage_folder(folder / "ids") as staging:
                    found.write(staging)
                    (staging / _MADE).write_text(json.dumps(_made_of(method, seed), indent=1) + "\n")


def read_ids(method: GenerativeMethod, seed: int, cuts: Cuts, folder: Path) -> SemanticIds:
    """Read the semantic ids that `keep_ids` stored.

    Raises:
      DataError: They are absent, or were made with another seed or other settings, or for other items.
    """
    kept = folder / "ids"
    if not kept.exists():
        raise DataError("its semantic ids are gone", path=kept, advice=_AGAIN)
    found = SemanticIds.read(kept)
    try:
        made = parse_json((kept / _MADE).read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"can't be read: {error}", path=kept / _MADE, advice=_AGAIN) from error
    wanted = json.loads(json.dumps(_made_of(method, seed)))
    for name, value in wanted.items():
        if made.get(name) != value:
            raise DataError(
                f"these semantic ids were made with {name} = {made.get(name)!r}, and now it is {value!r}",
                path=kept,
                advice=_AGAIN,
            )
    if not np.array_equal(found.items, cuts.ids):
        raise DataError(
            f"these semantic ids are of {len(found.items):,} items, and not of the {cuts.items:,} items that "
            "are trained on",
            path=kept,
            advice=_AGAIN,
        )
    return found


_AGAIN = "delete the folder that it is in, and train again"
_ID_SETTINGS = ("ids", "attributes", "levels", "codes", "balanced", "id_dim", "item_epochs")


def _made_of(method: GenerativeMethod, seed: int) -> dict[str, Any]:
    return {"seed": seed, **{name: getattr(method, name) for name in _ID_SETTINGS}}


def check_source(method: GenerativeMethod) -> None:
    """Check, before any training, that the source of semantic ids and the package that makes them exist.

    Raises:
      GmetaError: scikit-learn isn't installed, and the ids aren't given; the message names the extra.
      ConfigError: There is no such source or folder.
    """
    if method.makes_ids:
        import sklearn  # noqa: F401
    else:
        _given_folder(method)


def describe_ids(method: GenerativeMethod) -> str:
    """Describe the source of a method's semantic ids, as part of a sentence."""
    if not method.makes_ids:
        return f"those of {method.ids}"
    columns = f" and the columns {', '.join(method.attributes or ())}" if method.attributes else ""
    known = {
        "attributes": f"neighbours in training histories{columns}",
        "cooccurrence": "neighbours in training histories",
        "items": f"the item vectors of a SASRec after {method.item_epochs} epochs",
        "random": f"those of neighbours{columns}, each given to another item",
    }
    return f"{method.levels} codes of {method.codes}, from {known[str(method.ids)]}"


# The model.

MakeBackbone = Callable[..., tf.keras.layers.Layer]
"""(kind, method, tokens, timed, seed) -> a backbone that reads sequences of so many tokens."""


def build(
    config: CatalogueConfig,
    method: GenerativeMethod,
    seed: int,
    cuts: Cuts,
    ids: SemanticIds,
    backbone: MakeBackbone,
    timed: bool,
) -> GenerativeRetriever | FlatRetriever:
    """Build and compile the model, at its initial weights.

    Args:
      config: The experiment.
      method: The settings.
      seed: The seed of weights, dropout and negatives.
      cuts: The data.
      ids: The semantic ids of the catalogue.
      backbone: Makes the backbone.
      timed: Whether the backbone reads times.
    """
    random.seed(seed)  # Keras' layers take their seeds from it
    tf.random.set_seed(seed)
    s = method
    assert s.max_length is not None  # `GenerativeMethod.complete` sets it
    depth = s.depth or len(ids.codebooks.sizes)  # for given ids
    numbered = replace(ids, items=np.arange(cuts.items))  # models identify items by number
    common: dict[str, Any] = {
        "max_length": s.max_length,
        "time": "time" if timed else None,
        "depth": depth,
        "beam": s.beam,
        "dropout": s.dropout,
        "seed": seed,
        "ks": config.ks,
    }
    model: GenerativeRetriever | FlatRetriever
    if s.form == "flat":
        assert s.softmax is not None
        tokens = (depth + 1) * (s.max_length + 1) + 1  # of a history, its beginning and the answer
        stack = backbone(s.backbone, s, tokens, timed, seed)
        model = FlatRetriever(stack, numbered, dim=s.dim, softmax=s.softmax, **common)
    else:
        deviation = (2 / (cuts.items + s.dim)) ** 0.5  # Xavier's
        collection = EmbeddingCollection(
            [FeatureConfig("item", TableConfig("item", s.dim, initializer=Normal(0.0, deviation)))],
            optimizer=AdamW(s.learning_rate, beta_2=_BETA_2, weight_decay=s.weight_decay or 0.0),
            seed=seed,
        )
        own = {"width": s.width, "blocks": s.decoder_blocks, "heads": s.decoder_heads, "sampled": s.sampled}
        model = GenerativeRetriever(
            collection,
            backbone(s.backbone, s, s.max_length, timed, seed),
            numbered,
            negatives=s.negatives,
            repeats=bool(s.repeats),
            **{**common, **own},
        )
    model.compile(tf.keras.optimizers.Adam(s.learning_rate, beta_2=_BETA_2))
    return model


# Scores.


@dataclass(frozen=True)
class SearchScorer:
    """A trained model as a `gmeta.experiment.next_item.counting.Scorer`.

    An item's score is the log of its probability if the search finds it, and otherwise -inf, so that it
    counts as a miss. The search is wider than the model's ``beam`` by at least ``max_length``, and by the
    number of items in the history, so that ``beam`` items remain after those of the history are left out.
    """

    model: GenerativeRetriever | FlatRetriever

    def scores(self, histories: Histories) -> Scores:
        """Search for each history, and return (users, items)."""
        found = np.full((len(histories), self.model.items), -np.inf, np.float32)
        pairs = np.unique(histories.owner * self.model.items + histories.items)
        distinct = np.bincount(pairs // self.model.items, minlength=len(histories))
        widths = np.array([self.width(each) for each in distinct.tolist()], np.int64)
        for width in np.unique(widths).tolist():
            search = self.search(width)
            users = np.flatnonzero(widths == width)
            at_once = max(_BEAMS // width, 1)
            for begin in range(0, len(users), at_once):
                some = users[begin : begin + at_once]
                items, scores = (each.numpy() for each in search(histories.choose(some).ragged()))
                there = items >= 0
                found[np.repeat(some, there.sum(axis=1)), items[there]] = scores[there]
        return found

    def width(self, items: int) -> int:
        """Return the width of the search for a history with ``items`` distinct items."""
        width = self.model.beam
        while width < self.model.beam + max(items, self.model.max_length):
            width *= 2  # few widths, and hence few graphs
        return min(width, self.model.items)

    def search(self, width: int) -> Callable[[Mapping[str, Any]], tuple[tf.Tensor, tf.Tensor]]:
        """Return a function that finds ``width`` items for a batch: numbers (users, width), and scores."""
        popular = [tf.constant(each.numpy()) for each in self.model.catalogue.most_popular(width)]
        options: dict[str, Any] = {"k": width, "beam": width, "popular": popular}
        if isinstance(self.model, GenerativeRetriever):
            options["rows"] = tf.Variable(self.model.item_rows(), trainable=False)
        return lambda x: self.model.retrieve(x, **options)


def check_answer(scorer: Scorer, k: int) -> None:
    """Check that a search finds at least k items.

    Raises:
      ConfigError: The search is too narrow.
    """
    if isinstance(scorer, SearchScorer) and k > min(scorer.model.beam, scorer.model.items):
        raise ConfigError(
            f"k must be at most {min(scorer.model.beam, scorer.model.items)}, the items that the search with "
            f"this beam finds for certain, got {k}: name another --method, or train with a wider beam"
        )
