"""The order in which a collection puts the vectors of its features side by side.

A dense layer that reads vectors side by side belongs to their order. So a collection keeps to the order that
its weights were saved with, whatever the order of its own features is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import tensorflow as tf

from gmeta.core.errors import ConfigError, warn_caller
from gmeta.layers.embedding.feature_config import FeatureConfig
from gmeta.layers.embedding.saved_tables import Plan, Widths

_SYMBOLIC = (
    "_scratch_graph"  # in whose graphs Keras calls the layers of a functional model once, to wire them
)


class FeatureOrder:
    """The order of a collection's features.

    Args:
      owner: The collection's name, for messages.
      features: Its features, in the order that it starts with.

    Attributes:
      owner: The collection's name.
      features: The features in their order.
    """

    def __init__(self, owner: str, features: Sequence[FeatureConfig]) -> None:
        self.owner, self.features = owner, tuple(features)
        self._reader = ""  # what has put vectors side by side in this order, and can't change it
        self._called = False  # whether a graph has the vectors by name, in a dict of this order

    @property
    def widths(self) -> Widths:
        """The features in their order, with the widths of their vectors."""
        return tuple((feature.name, feature.width) for feature in self.features)

    def note_call(self) -> None:
        """Note that vectors are given by name."""
        self._called |= not tf.executing_eagerly()

    def note_concat(self) -> None:
        """Note that vectors are put side by side."""
        if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().name.endswith(_SYMBOLIC):
            self.fix("a graph that is traced already")

    def fix(self, reader: str) -> None:
        """Keep the order from now on, because ``reader`` has positions that belong to it."""
        self._reader = self._reader or reader

    def follow(self, plan: Plan) -> None:
        """Take over the order that weights were saved with.

        Features that weren't saved come last; each that is as wide as one that is gone takes its place.

        Raises:
          ConfigError: The order can't change any more.
        """
        saved = plan.features or self._noted_by_tables(plan)
        names, own = self._after(saved), [name for name, _ in self.widths]
        if moved := _moved(saved, [(name, dict(self.widths)[name]) for name in names]):
            warn_caller(
                f"{self.owner!r}: side by side, the vectors of {', '.join(moved)} begin at other places than "
                "in what is loaded, and all vectors together are as wide. A dense layer that reads them side "
                "by side loads weights that belong to other vectors: give that layer another name, and it "
                "is reinitialized"
            )
        if names == own:
            return
        said = f"{self.owner!r}: what is loaded was saved with the features in "
        said += f"the order {', '.join(name for name, _ in saved)}" if saved else "an order that isn't noted"
        side_by_side = f"vectors side by side in the order {', '.join(own)}"
        if self._reader and names:
            raise ConfigError(
                f"{said}, but {self._reader} has put their {side_by_side}: load right after the model is "
                "made, or make the collection with the features in the saved order"
            )
        if self._called or not names:
            warn_caller(
                f"{said}. Rows find their tables. But if the network puts {side_by_side}, its dense "
                "weights may belong to other vectors now: make the collection with the features in the saved "
                "order, or take the vectors by name"
            )
            return
        by_name = {feature.name: feature for feature in self.features}
        self.features = tuple(by_name[name] for name in names)
        warn_caller(
            f"{said}. The collection puts vectors side by side in the order {', '.join(names)} from now "
            "on; a network that lists the features itself must list them so, too"
        )

    def _noted_by_tables(self, plan: Plan) -> Widths:
        """Return the features in the order of the tables, from a time when only that was noted.

        Returns:
          The features; none, if the tables are in another order than those of the features here, and were
          merged in several, so that the order of the features isn't known.
        """
        own = [table.name for feature in self.features for table in feature.tables]
        groups = [[name for name in keys.tables if name in own] for keys in plan.keys]
        firsts = [group[0] for group in groups if group]
        if all(sorted(names, key=own.index) == names for names in (firsts, *groups)):
            return self.widths
        return tuple((name, plan.dims[0]) for name in plan.keys[0].tables) if len(groups) == 1 else ()

    def _after(self, saved: Widths) -> list[str]:
        """Return the names of the features in the order of what was saved; none if that isn't known."""
        if not saved:
            return []
        own = dict(self.widths)
        fresh = [name for name in own if name not in dict(saved)]
        names = []
        for name, width in saved:
            if name in own:
                names.append(name)
            elif (heir := next((each for each in fresh if own[each] == width), None)) is not None:
                names.append(heir)
                fresh.remove(heir)
        return [*names, *fresh]


def _moved(saved: Widths, now: Sequence[tuple[str, int]]) -> list[str]:
    """Return the features that begin elsewhere, if all together are as wide as before."""

    def places(widths: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        ends = accumulate((width for _, width in widths), initial=0)
        return dict(zip(widths, ends, strict=False))

    if sum(width for _, width in saved) != sum(width for _, width in now):
        return []
    before = places(saved)
    return [each[0] for each, place in places(now).items() if before.get(each, place) != place]
