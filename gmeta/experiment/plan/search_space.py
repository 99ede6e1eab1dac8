"""The settings of methods that `gmeta tune` searches over, and the values that it tries.

A key names a setting by its path in the method, ``"inner.learning_rate"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gmeta.experiment.plan.experiment_config import FACTORS, MethodConfig
from gmeta.experiment.plan.generative_config import GenerativeMethod
from gmeta.experiment.plan.next_item_config import NextItemMethod, TwoTowerMethod
from gmeta.experiment.plan.ranking_config import GRM, RankingMethod

M = TypeVar("M")


@dataclass(frozen=True)
class Range:
    """A setting that is a number.

    Attributes:
      key: The setting.
      least: The lowest value.
      most: The highest value.
      log: Whether values are drawn uniformly on the log scale.
      whole: Whether the setting is a whole number.
    """

    key: str
    least: float
    most: float
    log: bool = True
    whole: bool = False

    def round(self, value: float) -> float:
        """Round the value for a settings file: to a whole number, or to three significant digits."""
        return round(value) if self.whole else float(f"{value:.3g}")


@dataclass(frozen=True)
class Choice:
    """A setting that is one of a few values.

    Attributes:
      key: The setting.
      values: The values.
    """

    key: str
    values: tuple[Any, ...]

    def round(self, value: Any) -> Any:
        """Return the value."""
        return value


Space = Sequence[Range | Choice]


def get_setting(method: Any, key: str) -> Any:
    """Return a setting of a method.

    Example:
      >>> get_setting(MethodConfig("MAML", "adapts", epochs=7), "epochs")
      7
    """
    for name in key.split("."):
        method = getattr(method, name)
    return method


def put_setting(method: M, key: str, value: Any) -> M:
    """Return the method with a new value of a setting."""
    name, _, rest = key.partition(".")
    return replace(method, **{name: put_setting(getattr(method, name), rest, value) if rest else value})  # type: ignore[type-var]


# The space of each kind of method, which contains the settings that a search starts with.


def cold_start_space(starts: Sequence[MethodConfig]) -> Space:
    """Return the settings of a cold-start method that are searched over.

    Args:
      starts: The settings of the first trials.
    """
    first = starts[0]
    rates = ["learning_rate", *(["row_learning_rate"] if first.row_learning_rate is not None else [])]
    if first.model == FACTORS:
        priors = ("own_bias", "own_factors", "bias", "factors", "user")
        return [
            *(_around(starts, rate, 8.0) for rate in rates),
            _around(starts, "epochs", 2.5, whole=True),
            _within(starts, "factors.dim", 2, 64, whole=True),
            _within(starts, "factors.dropout", 0.0, 0.8, log=False),
            *(_around(starts, f"factors.{prior}", 30.0) for prior in priors),
        ]
    space = [*(_around(starts, rate, 20.0) for rate in rates), _around(starts, "epochs", 2.0, whole=True)]
    if first.inner.algorithm != "ridge":
        space.append(_around(starts, "inner.learning_rate", 30.0))
        if first.inner.steps > 0:
            space.append(_within(starts, "inner.steps", 1, 5, log=False, whole=True))
    return space


def next_item_space(starts: Sequence[NextItemMethod] | Sequence[GenerativeMethod]) -> Space:
    """Return the settings of a model of the next item that are searched over; validation ends its epochs."""
    first = starts[0]
    widths = {width for width in (32, 64, 128, 256) if width % first.heads == 0}
    of_cosines = isinstance(first, NextItemMethod) and first.normalize
    return [
        _around(starts, "learning_rate", 10.0),
        _within(starts, "dropout", 0.0, 0.7, log=False),
        *([_within(starts, "temperature", 0.02, 1.0)] if of_cosines else []),
        _within(starts, "blocks", 1, 3, log=False, whole=True),
        Choice("dim", tuple(sorted(widths | {each.dim for each in starts}))),
    ]


def generative_space(starts: Sequence[GenerativeMethod]) -> Space:
    """Return the settings of a generative model that are searched over, apart from its semantic ids."""
    first = starts[0]
    decoder = first.form == "decoder"
    heads = first.decoder_heads or 1
    widths = {width for width in (32, 64, 128, 256) if width % heads == 0}
    return [
        *next_item_space(starts),
        *([_within(starts, "sampled", 0.1, 3.0)] if decoder and first.sampled else []),
        *(
            [Choice("width", tuple(sorted(widths | {each.width or 64 for each in starts})))]
            if decoder
            else []
        ),
    ]


def retrieval_space(starts: Sequence[TwoTowerMethod]) -> Space:
    """Return the settings of a two-tower model that are searched over; validation ends its epochs."""
    first = starts[0]
    return [
        _around(starts, "learning_rate", 10.0),
        _within(starts, "dropout", 0.0, 0.7, log=False),
        *([_within(starts, "item_dropout", 0.0, 0.8, log=False)] if first.history else []),
        *([_within(starts, "temperature", 0.02, 1.0)] if first.normalize else []),
        Choice("dim", tuple(sorted({32, 64, 128, 256} | {each.dim for each in starts}))),
        Choice("law", ("uniform", "popularity", "in-batch")),
    ]


def ranking_space(starts: Sequence[RankingMethod]) -> Space:
    """Return the settings of a model of rows that are searched over; validation ends its epochs."""
    first = starts[0]
    return [
        _around(starts, "learning_rate", 10.0),
        _around(starts, "variance", 30.0),
        _around(starts, "bias_variance", 10.0),
        _within(starts, "dim", 2, 64, whole=True),
        _within(starts, "unknown", 0.0, 0.3, log=False),
        *([] if first.model == "fm" else [_within(starts, "dropout", 0.0, 0.6, log=False)]),
        *([_within(starts, "cross", 1, 4, log=False, whole=True)] if first.model == "dcn" else []),
        *(_of_sequences(starts) if first.model == GRM else []),
    ]


def _of_sequences(starts: Sequence[RankingMethod]) -> Space:
    widths = {width for width in (16, 32, 64, 128) if width % starts[0].heads == 0}
    return [
        _within(starts, "blocks", 1, 3, log=False, whole=True),
        _within(starts, "longest", 20, 500, whole=True),
        Choice("width", tuple(sorted(widths | {each.width for each in starts}))),
    ]


def _around(starts: Sequence[Any], key: str, by: float, whole: bool = False) -> Range:
    """Return the range from a ``by``-th of the starts' values to ``by`` times them."""
    values = [get_setting(each, key) for each in starts]
    least, most = min(values) / by, max(values) * by
    return Range(key, max(round(least), 1) if whole else least, round(most) if whole else most, whole=whole)


def _within(
    starts: Sequence[Any], key: str, least: float, most: float, log: bool = True, whole: bool = False
) -> Range:
    values = [get_setting(each, key) for each in starts]
    return Range(key, min(least, *values), max(most, *values), log, whole)
