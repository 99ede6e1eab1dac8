"""An experiment that ranks a catalogue: its plan, then a run.

The plan completes the settings. A run trains, chooses baselines' settings and the blend, and measures::

  RUN/config.json                settings (`gmeta.experiment.runs.run_folder`)
  RUN/sasrec/seed-0/             checkpoints of the last epoch, its curves, and best/, the best epoch
  RUN/chosen.json                the settings of the baselines and the weights of the blends, by validation
  RUN/evaluation.json, RUN/report.html, RUN/figures/
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gmeta.core import collectives
from gmeta.core.collectives.rank_group import Ranks
from gmeta.core.data_manifest import Manifest, Texts
from gmeta.core.errors import ConfigError
from gmeta.core.schema import OnBad, Schema
from gmeta.core.settings import from_mapping
from gmeta.experiment.next_item import counting, models
from gmeta.experiment.next_item.blend import Blend, scores_of_all
from gmeta.experiment.next_item.counting import Scorer
from gmeta.experiment.next_item.generative import attributes_of, check_source, describe_ids
from gmeta.experiment.next_item.histories import (
    Asked,
    Cuts,
    core,
    cut,
    first_of_each,
    read_events,
    time_column,
)
from gmeta.experiment.next_item.ranked import Ranked, ndcg, rank_all
from gmeta.experiment.next_item.side_columns import SideColumns
from gmeta.experiment.plan.generative_config import GenerativeMethod
from gmeta.experiment.plan.next_item_config import BLEND, CatalogueConfig, NextItemConfig
from gmeta.experiment.plan.own_columns import likeliest_item, survey
from gmeta.experiment.runs.all_runs import TrainingProgress
from gmeta.experiment.runs.best_epoch import CHOSEN, TrainedRun, read_chosen, save_chosen
from gmeta.experiment.runs.run_folder import RunFolder
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


# Training, and what is chosen by validation.

_TUNED_USERS = 2000
"""Settings of baselines are chosen by so many users of validation at most."""


def train_catalogue(
    config: CatalogueConfig,
    run: RunFolder,
    data: Path,
    *,
    progress: TrainingProgress,
    on_bad: OnBad = "raise",
) -> None:
    """Train every method with every seed; in a single process, also do what `finish_catalogue` does.

    Interrupted training is resumed, also by a different number of ranks; finished training is skipped. In a
    job of several ranks, all ranks call it together, and a separate process must call `finish_catalogue`,
    which needs all rows of the models, and several times their memory for the baselines.

    Raises:
      ConfigError: The folder holds other settings, or another job trains in it.
      DataError: The data set or a checkpoint can't be read.
    """
    here = collectives.world()
    lock = run.lock
    with Ranks.of().together():
        if here.rank == 0:
            lock.take()
    try:
        with Ranks.of().together():
            if here.rank == 0:
                run.begin(config, data)
        collectives.check_agreement(
            {"data": Manifest.load(data).digest}, advice="give every rank the same prepared data set"
        )
        cuts = read_cuts(config, data, on_bad)
        for method, settings in config.methods.items():
            for seed in config.seeds:
                label = f"{settings.label}, seed {seed}"
                done = models.train(
                    config,
                    method,
                    seed,
                    cuts=cuts,
                    folder=run.training(method, seed),
                    callbacks=[progress.track(label, settings.epochs)],
                )
                if done:
                    progress.say(f"{label}: resumed after epoch {done}")
        if here.size == 1:
            _finish(config, run, cuts, progress.say)
    finally:
        lock.release()


def finish_catalogue(run: RunFolder, *, say: Callable[[str], None], on_bad: OnBad = "raise") -> None:
    """Choose the baselines' settings and fit the blends, after several ranks trained the models.

    Raises:
      ConfigError: Another job trains in the folder.
      DataError: The data set or a checkpoint can't be read, or the models aren't fully trained.
    """
    config, data = run.load()
    lock = run.lock
    lock.take()
    try:
        _finish(config, run, read_cuts(config, data, on_bad, attributes=False), say)
    finally:
        lock.release()


def _finish(config: CatalogueConfig, run: RunFolder, cuts: Cuts, say: Callable[[str], None]) -> None:
    if not (run.path / CHOSEN).exists():
        save_chosen(run, _choose(config, run, cuts, say))


def _choose(
    config: CatalogueConfig, run: RunFolder, cuts: Cuts, say: Callable[[str], None]
) -> dict[str, Any]:
    """Choose the settings of all baselines, and fit the blend of each seed."""
    asked = cuts.validation
    if len(asked) > _TUNED_USERS:
        drawn = np.random.default_rng(0).permutation(len(asked))[:_TUNED_USERS]
        asked = asked.choose(np.sort(drawn))
    k = config.ks[0]
    chosen: dict[str, Any] = {}
    fitted: dict[str, Scorer] = {}
    found: dict[str, list[float]] = {}

    timed = cuts.train.times is not None
    for name, grid in counting.grids(cuts.items, times=timed, ordered=config.ordered).items():
        best = -1.0
        known: counting.Known = {}
        for settings in grid:
            scorer = settings.fit(cuts.train, cuts.items, known)
            value = ndcg(scorer, asked, cuts.items, seen=bool(config.seen), k=k)
            if value > best:
                best, chosen[name], fitted[name] = value, asdict(settings), scorer  # type: ignore[call-overload]
        found[name] = [best]
        say(f"{counting.LABELS[name]}: NDCG@{k} {best:.4f} in validation")
    if cuts.items > counting.MOST_ITEMS:
        say(f"EASE is left out: it inverts a matrix of items by items, and there are {cuts.items:,}")
    blends = {}
    scorers: dict[tuple[str, int], Scorer] = {}
    for seed in config.seeds:
        own = _models(config, run, cuts, seed)
        scorers |= {(name, seed): scorer for name, scorer in own.items()}
        if config.blend:
            blend = Blend.fit({**own, **fitted}, cuts.validation, cuts.items, seed, sets=config.SETS)
            say(f"blend, seed {seed}: {blend.describe()}")
            blends[str(seed)] = blend.to_json()
            scorers[BLEND, seed] = blend.of({**own, **fitted})
    for (name, _), ranked in _rank_all(scorers, asked, cuts.items, [bool(config.seen)], k)[
        bool(config.seen)
    ].items():
        found.setdefault(name, []).append(float(ranked.of_users(k)["ndcg"].mean()))
    return {
        "baselines": chosen,
        "blends": blends,
        "validation": {name: float(np.mean(values)) for name, values in found.items()},
    }


def _models(config: CatalogueConfig, run: RunFolder, cuts: Cuts, seed: int) -> dict[str, Scorer]:
    return {
        method: models.load_best(config, method, seed, cuts=cuts, folder=run.training(method, seed))
        for method in config.methods
    }


@dataclass(frozen=True)
class Trained(TrainedRun):
    """A trained run, ready to rank; its values in validation are NDCG at the first k.

    Attributes:
      cuts: Its data, cut.
      schema: The columns of its data set.
      texts: The texts that the numbers of these columns represent.
    """

    HIGHER = True
    LABELS = counting.LABELS

    cuts: Cuts
    schema: Schema
    texts: Texts


def load_catalogue(run: RunFolder, on_bad: OnBad = "raise") -> Trained:
    """Load a trained run: its models at their best epochs, and the baselines with the chosen settings.

    Raises:
      DataError: The run isn't fully trained.
    """
    config, data = run.load(unchanged=True)
    assert isinstance(config, CatalogueConfig)
    cuts = read_cuts(config, data, on_bad, attributes=False)
    with read_chosen(run) as chosen:
        settings = {name: counting.settings_of(name, values) for name, values in chosen["baselines"].items()}
        blends = {int(seed): Blend.from_json(values) for seed, values in chosen["blends"].items()}
        validation = {str(name): float(value) for name, value in chosen["validation"].items()}
    baselines = {name: each.fit(cuts.train, cuts.items) for name, each in settings.items()}
    methods: dict[str, dict[int, Scorer]] = {}
    for seed in config.seeds:
        own = _models(config, run, cuts, seed)
        for name, scorer in own.items():
            methods.setdefault(name, {})[seed] = scorer
        if seed in blends:
            methods.setdefault(BLEND, {})[seed] = blends[seed].of({**own, **baselines})
    described = {name: each.describe() for name, each in settings.items()}
    described |= {BLEND: "; ".join(each.describe() for each in blends.values())} if blends else {}
    manifest = Manifest.load(data)
    texts = Texts(data, manifest.texts)
    return Trained(
        config, baselines, described, methods, validation, cuts=cuts, schema=manifest.schema, texts=texts
    )


@dataclass(frozen=True)
class Measured:
    """The rankings of a run's methods and baselines.

    Attributes:
      trained: The run.
      test: Whether seen items are ranked (never for sets) -> name -> seeds -> the ranks; a baseline has one
        seed.
    """

    trained: Trained
    test: Mapping[bool, Mapping[str, Sequence[Ranked]]]


def measure(trained: Trained) -> Measured:
    """Rank the catalogue for all test users, by all methods and baselines."""
    config, cuts = trained.config, trained.cuts
    scorers = {(name, seed): each for name, seeds in trained.methods.items() for seed, each in seeds.items()}
    scorers |= {(name, 0): scorer for name, scorer in trained.baselines.items()}
    ways = (False,) if config.SETS else (bool(config.seen), not config.seen)
    test: dict[bool, dict[str, list[Ranked]]] = {}
    for seen, found in _rank_all(scorers, cuts.test, cuts.items, ways, max(config.ks)).items():
        for (name, _), ranked in found.items():
            test.setdefault(seen, {}).setdefault(name, []).append(ranked)
    return Measured(trained, test)


def _rank_all(
    scorers: Mapping[tuple[str, int], Scorer], asked: Asked, items: int, seen: Sequence[bool], shown: int
) -> dict[bool, dict[tuple[str, int], Ranked]]:
    return rank_all(
        functools.partial(scores_of_all, scorers), asked, items, seen=seen, shown=shown, width=len(scorers)
    )
