"""Completes the settings of an experiment that ranks a catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError
from gmeta.core.schema import OnBad
from gmeta.core.settings import from_mapping
from gmeta.experiment.next_item.generative import attributes_of, check_source, describe_ids
from gmeta.experiment.next_item.histories import Cuts, core, cut, first_of_each, read_events, time_column
from gmeta.experiment.next_item.side_columns import SideColumns
from gmeta.experiment.plan.generative_config import GenerativeMethod
from gmeta.experiment.plan.next_item_config import CatalogueConfig, NextItemConfig
from gmeta.experiment.plan.own_columns import likeliest_item, survey
from gmeta.io.cuts.task_choice import TaskChoice


@dataclass(frozen=True)
class Planned:
    """An experiment, and sentences that describe the decisions made for it."""

    config: CatalogueConfig
    notes: tuple[str, ...] = ()


def read_cuts(
    config: CatalogueConfig, data: Path, on_bad: OnBad = "raise", *, attributes: bool = True
) -> Cuts:
    """Read the data set of an experiment, and cut it.

    Args:
      config: The experiment.
      data: The data set.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      attributes: Whether to read the attributes of items from which methods make semantic ids.

    Raises:
      ConfigError: The protocol requires times that the data set lacks, a method names a column that is
        neither one of users nor one of items, or a user tower reads nothing.
      DataError: The data set can't be read, or a part is empty.
    """
    events, ids = read_events(data, config.item, on_bad, ordered=config.ordered)
    if config.SETS:
        events = first_of_each(events)
    events, ids = core(events, ids, *config.core)
    cuts = cut(events, ids, config.protocol)
    reading = [method for method in config.methods.values() if getattr(method, "columns", False)]
    of_ids = attributes and any(
        isinstance(method, GenerativeMethod) and method.reads_attributes for method in config.methods.values()
    )
    if reading or of_ids:
        columns = SideColumns.read(data, config.item, on_bad)
        for method in reading:
            of_users, _ = columns.names(method.columns)  # raises for unknown ones
            if not (of_users or method.user_id or method.history):
                raise ConfigError(
                    f"method {method.label!r}: columns names none of users, and the user tower would read "
                    "nothing: set user_id or history to true, or name a column of users"
                )
        cuts = replace(cuts, columns=columns)
    return cuts


def plan_catalogue(
    given: Mapping[str, Any],
    data: Path,
    where: str = "config",
    on_bad: OnBad = "raise",
    kind: type[CatalogueConfig] = NextItemConfig,
) -> Planned:
    """Decide the settings that aren't given.

    Args:
      given: Keys of ``kind`` and values, without ``for``.
      data: A prepared data set whose tasks are users.
      where: The name of the settings in error messages.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      kind: The experiment, of `gmeta.experiment.runs.run_folder.FAMILIES`.

    Raises:
      ConfigError: A key or a value is unknown, or no column looks like an item.
      DataError: The data set can't be read, or no events remain.
    """
    manifest = Manifest.load(data)
    if (manifest.config.get("table") or {}).get("blocks"):
        raise ConfigError(
            f"{data} was prepared without users, who have histories: prepare it with --task COLUMN"
        )
    names = [column.name for column in manifest.schema]
    item = given.get("item")
    if item is None:
        roles = (manifest.schema.task, manifest.schema.batch, time_column(manifest))
        ids = [
            column.name
            for column in manifest.schema
            if column.dtype == "int64" and not column.is_list and column.name not in roles
        ]
        found = survey(data / next(iter(manifest.splits)), manifest.schema, "", TaskChoice())
        item = likeliest_item(found, ids)
        if item is None:
            raise ConfigError(
                f"{data}: no column looks like an item's id, one that several tasks share; name it, --set "
                f"'item=\"COLUMN\"'; the columns are {', '.join(names)}"
            )
    column = next((each for each in manifest.schema if each.name == item), None)
    if column is None or column.is_list or column.dtype != "int64":
        what = "isn't there" if column is None else "holds lists or floats"
        raise ConfigError(
            f"{where}: item={item!r} {what}: name a column of ids; the columns are {', '.join(names)}"
        )
    config = from_mapping(kind, {**given, "item": item}, where)
    cuts = read_cuts(config, data, on_bad)
    events = cuts.whole
    repeats = 1 - len(np.unique(events.owner * cuts.items + events.items)) / len(events.items)
    if config.seen is None:
        config = replace(config, seen=repeats > 0.02)
    methods, of_ids = {}, []
    for name, method in config.methods.items():
        if not isinstance(method, GenerativeMethod):
            methods[name] = method.complete(cuts.train.sizes)
            continue
        check_source(method)
        methods[name] = method.complete(cuts.train.sizes, cuts.items, attributes_of(method, cuts))
        of_ids.append(f"semantic ids of {method.label}: {describe_ids(methods[name])}")
    counted = (
        "of each user, an item counts once"
        if config.SETS
        else f"{repeats:.1%} of events repeat an earlier item of their user"
    )
    notes = (
        f"{config.title} for {manifest.schema.task}: {len(cuts.train):,} users, {cuts.items:,} items, "
        f"{len(cuts.train.items):,} events to train on",
        f"protocol {config.protocol}: {len(cuts.validation):,} users in validation, {len(cuts.test):,} in "
        f"the test{_DRAWN if config.protocol == 'random' else ''}",
        f"{counted}: items seen are {'ranked too' if config.seen else 'left out of the ranking'}",
        *_columns_note(cuts, config),
        *of_ids,
    )
    return Planned(replace(config, methods=methods), notes)


def _columns_note(cuts: Cuts, config: CatalogueConfig) -> list[str]:
    chosen = [getattr(method, "columns", False) for method in config.methods.values()]
    if cuts.columns is None or not any(chosen):
        return []
    read: list[dict[str, None]] = [{}, {}]
    for each in chosen:
        for own, names in zip(read, cuts.columns.names(each), strict=True):
            own |= dict.fromkeys(names)
    of_users, of_items = (", ".join(own) or "none" for own in read)
    return [f"columns of {config.item}: {of_items}; of users: {of_users}"]


_DRAWN = (
    ", each asked for a tenth of its items, drawn evenly; --set 'protocol=\"time\"' asks for what came last"
)
