"""Merges tables, keeps the ids of different tables apart in the merged one, and orders the features' vectors.

MTGenRec section 3.2: tables of equal width and policy become one physical table, so that a step makes one
lookup instead of one per feature. `gmeta.core.merged_tables` describes how ids become keys.

A dense layer that reads vectors side by side belongs to their order. So a collection keeps to the order that
its weights were saved with, whatever the order of its own features is (`FeatureOrder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import tensorflow as tf

from gmeta.core.errors import ConfigError, warn_caller
from gmeta.core.merged_tables import MOST_HASHED, Fold, MergedKeys
from gmeta.layers.embedding.feature_config import FeatureConfig
from gmeta.layers.embedding.saved_tables import Plan, Widths
from gmeta.layers.embedding.table_config import RowPolicy, TableConfig
from gmeta.ops.table.hash_table import HashTable


@dataclass(frozen=True)
class MergedTable:
    """A physical table: the policy of its rows, and the tables merged into it.

    Attributes:
      policy: Width, initial values, admission, eviction, precision and optimizer of its rows.
      tables: The merged tables' names; a table's position is its number i.
      features: The features that read these tables, in the order of the collection; of a feature that reads
        several tables, the parts that read these (`gmeta.layers.FeatureConfig.parts`).
    """

    policy: RowPolicy
    tables: tuple[str, ...]
    features: tuple[FeatureConfig, ...]

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self.policy.dim

    def keys(self, fold: Fold) -> MergedKeys:
        """Describe how the tables' ids become keys, hashed ones by ``fold``."""
        return MergedKeys(self.tables, self.hashed, fold)

    @property
    def id_bits(self) -> int:
        """The number of bits that a raw id may have."""
        return MergedKeys(self.tables).id_bits

    @property
    def id_limit(self) -> int:
        """The limit of raw ids, which are in [0, id_limit)."""
        return 1 << self.id_bits

    @property
    def hashed(self) -> tuple[str, ...]:
        """The names of the tables whose ids are hashed."""
        names = {_table_of(feature).name for feature in self.features if feature.hash}
        return tuple(table for table in self.tables if table in names)

    def name_in(self, collection: str) -> str:
        """Return the physical table's name in a collection of that name."""
        return f"{collection}/{'+'.join(self.tables)}"

    def key_prefix(self, feature: FeatureConfig) -> int:
        """Return the table's bits of the key, which are or-ed into the feature's raw ids."""
        return MergedKeys(self.tables).prefix_of(_table_of(feature).name)


def merge_tables(features: Sequence[FeatureConfig], fold: Fold = "mix") -> tuple[MergedTable, ...]:
    """Merge tables of equal policy.

    Args:
      features: The features.
      fold: The fold of hashed ids. With "mix", at most `MOST_HASHED` tables become one if any of them is
        hashed, so that each leaves an id its bits; more become several.

    Raises:
      ConfigError: There are no features, or something that isn't a feature; two features have one name, or
        disagree on the table they share.
    """
    if not features:
        raise ConfigError("a collection needs at least one feature")
    strange = next((each for each in features if not isinstance(each, FeatureConfig)), None)
    if strange is not None:
        raise ConfigError(f"features must be gmeta.layers.FeatureConfig(name, dim=...), got {strange!r}")
    parts = [part for feature in features for part in feature.parts]
    names = [name for each in features for name in {each.name, *(part.name for part in each.parts)}]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"features named twice: {', '.join(twice)}")
    shared: dict[str, TableConfig] = {}
    hashed: dict[str, bool] = {}
    for feature in parts:
        table = _table_of(feature)
        if hashed.setdefault(table.name, feature.hash) != feature.hash:
            raise ConfigError(
                f"feature {feature.name!r} shares table {table.name!r} with hash={feature.hash}, but "
                f"the table has hash={not feature.hash}: give all of its features the same"
            )
        if shared.setdefault(table.name, table) != table:
            raise ConfigError(
                f"feature {feature.name!r} shares table {table.name!r} but asks for {table}; the table is "
                f"{shared[table.name]}: give both features one TableConfig"
            )
    groups: dict[RowPolicy, list[str]] = {}
    for table in shared.values():
        groups.setdefault(table.policy, []).append(table.name)
    merged = []
    for policy, names in groups.items():
        bounded = fold == "mix" and any(hashed[name] for name in names)
        most = MOST_HASHED if bounded else len(names)
        for first in range(0, len(names), most):
            tables = tuple(names[first : first + most])
            own = tuple(part for part in parts if _table_of(part).name in tables)
            merged.append(MergedTable(policy, tables, own))
    return tuple(merged)


def _table_of(part: FeatureConfig) -> TableConfig:
    (table,) = part.tables
    return table


# Prints a merge plan as a readable table.

_HEADINGS = (
    *("table", "features", "dim", "ids below", "rows start as"),
    *("admission", "eviction", "precision", "optimizer"),
)


def plan_table(plan: Sequence[MergedTable], tables: Sequence[HashTable]) -> str:
    """Format a plan: headings, then one line for each physical table."""
    lines = [_HEADINGS, *(_cells(merged, table) for merged, table in zip(plan, tables, strict=True))]
    return "\n".join(align(lines))


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Join each line's cells to text, aligned in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _cells(merged: MergedTable, table: HashTable) -> tuple[str, ...]:
    rate = table.optimizer.learning_rate
    pace = "the Keras optimizer's rate" if rate is None else "a schedule" if callable(rate) else f"{rate:g}"
    return (
        table.name,
        ", ".join(_feature(feature, table.fold) for feature in merged.features),
        str(merged.dim),
        f"2^{merged.id_bits}",
        str(merged.policy.initializer),
        str(merged.policy.admission),
        "none" if merged.policy.eviction is None else str(merged.policy.eviction),
        "float32" if merged.policy.precision is None else str(merged.policy.precision),
        f"{type(table.optimizer).__name__} at {pace}",
    )


def _feature(feature: FeatureConfig, fold: Fold) -> str:
    """Format a feature's name, its pooling, and its table if neither it nor its part has that name."""
    hashed = ["hashed" if fold == "mix" else f"hashed, fold {fold}"] if feature.hash else []
    how = [*([] if feature.combiner is None else [feature.combiner]), *hashed]
    pooled = f"{feature.name} ({', '.join(how)})" if how else feature.name
    (table,) = feature.tables
    return pooled if table.name == feature.name.rpartition("/")[2] else f"{pooled} -> {table.name}"


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
