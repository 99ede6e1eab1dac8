"""Checks of the parts, settings and batches that a `TaskLearner` gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gmeta import meta
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection

_PARTS = ("features", "label", "task", "support", "query")


def check_collection(collection: Any) -> None:
    """Refuse a collection that isn't an `EmbeddingCollection`.

    Raises:
      ConfigError: It is something else, such as a list of features.
    """
    if not isinstance(collection, EmbeddingCollection):
        raise ConfigError(
            f"collection must be a gmeta.layers.EmbeddingCollection, got {type(collection).__name__}; "
            "make one from features: EmbeddingCollection([FeatureConfig(...), ...])"
        )


def check_inner(inner: Any) -> None:
    """Refuse an inner loop that isn't an `InnerLoop`.

    Raises:
      ConfigError: It is something else, such as the name of an algorithm.
    """
    if not isinstance(inner, meta.InnerLoop):
        raise ConfigError(
            f"inner must be a gmeta.meta.InnerLoop, such as InnerLoop('maml', steps=1), got {inner!r}"
        )


def check_compiled(learner: Any) -> None:
    """Refuse a learner that has no loss yet.

    Raises:
      ConfigError: The learner wasn't compiled.
    """
    if learner.loss is None:
        raise ConfigError(f"{learner.name}: compile the model first; the inner steps need its loss")


def columns_beside(learner: Any) -> list[str]:
    """List the columns that a learner's network takes by name and its collection doesn't embed."""
    embedded = {feature.name for feature in learner.collection.features}
    return [name for name in learner.input_names or () if name not in embedded]


def task_batch(batch: Any, columns: Iterable[str] = ()) -> Any:
    """Return the batch unchanged if it is a batch of tasks.

    Args:
      batch: The batch.
      columns: The columns that the network takes without embedding.

    Raises:
      ConfigError: It is a batch of samples, or of groups that aren't split into support and query; or it
        lacks a column.
    """
    missing = [part for part in _PARTS if part not in batch] if isinstance(batch, Mapping) else list(_PARTS)
    if not missing:
        lacking = [name for name in columns if name not in batch["features"]]
        if lacking:
            raise ConfigError(
                f"the network takes {', '.join(lacking)} by name, which is no feature of the collection and "
                f"no column of the batch; it has {', '.join(batch['features'])}. Read it with "
                "gmeta.io.tasks(features=[...]), or embed it"
            )
        return batch
    found = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise ConfigError(
        f"a MetaModel learns from and measures batches of tasks, as gmeta.io.tasks gives them: dicts of "
        f"{', '.join(_PARTS)}; got {found}. Samples of one task go to model.adapt and model.predict"
    )
