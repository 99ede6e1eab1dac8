"""Merges tables, and keeps the ids of different tables apart in the merged one.

MTGenRec section 3.2: tables of equal width and policy become one physical table, so that a step makes one
lookup instead of one per feature. `gmeta.core.merged_tables` describes how ids become keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gmeta.core.errors import ConfigError
from gmeta.core.merged_tables import MOST_HASHED, Fold, MergedKeys
from gmeta.layers.embedding.feature_config import FeatureConfig
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
