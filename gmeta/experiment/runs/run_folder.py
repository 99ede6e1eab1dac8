"""The files of a run on disk.

::

  RUN/data/                      the prepared data set (gmeta prepare)
  RUN/config.json                the settings; a run resumes only with the same settings
  RUN/maml/seed-0/               one training run: checkpoints and history.json
  RUN/ranking/                   a run for ranking, if cold start and ranking were trained side by side
  RUN/tune/study.db              trials of settings, and their results (gmeta tune)
  RUN/tuned.toml
  RUN/evaluation.json            (gmeta evaluate)
  RUN/report.html, RUN/figures/
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gmeta.checkpoint.lock import FILE_NAME, FolderLock
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import explain_write_errors, write_atomically
from gmeta.core.json_values import parse_json
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.experiment.plan.experiment_config import ExperimentConfig, budget_seconds
from gmeta.experiment.plan.next_item_config import CatalogueConfig, NextItemConfig, RetrievalConfig
from gmeta.experiment.plan.ranking_config import RankingConfig

Config = ExperimentConfig | CatalogueConfig | RankingConfig
FAMILIES: Mapping[str, type[Config]] = {
    "cold-start": ExperimentConfig,
    "ranking": RankingConfig,
    "next-item": NextItemConfig,
    "retrieval": RetrievalConfig,
}
"""What `gmeta train --for` names -> the settings of such an experiment."""


def family_of(config: Config) -> str:
    """Return an experiment's key in `FAMILIES`."""
    return next(name for name, kind in FAMILIES.items() if isinstance(config, kind))


def choose_families(given: str | None, settings: dict[str, Any], data: Path) -> tuple[str, ...]:
    """Return the purpose of an experiment, and remove it from the settings.

    Args:
      given: A key of `FAMILIES`, which the settings mustn't contradict; None: that of the settings, or else
        the one that the data set suggests. Data prepared without a label are for the next item or, without
        times, for retrieval. Data without users are for ranking. Data with users and a label are for cold
        start and ranking side by side, unless a setting belongs to only one of them.
      settings: The settings; their key ``for`` is removed.
      data: A prepared data set.

    Returns:
      Keys of `FAMILIES`. If there are two, the first one trains in the run's folder and the second one in
      `RunFolder.beside`.

    Raises:
      ConfigError: A key is unknown, or two different ones are given.
    """
    named = settings.pop("for", None)
    if named is not None and named not in FAMILIES:
        raise ConfigError(f"for = {named!r}: there are {', '.join(FAMILIES)}")
    if given and named and given != named:
        raise ConfigError(f"--for {given}, but the settings have for = {named!r}: leave one of them out")
    if given or named:
        return (str(given or named),)
    table = Manifest.load(data).config.get("table") or {}
    if table and not table.get("label") and "label" not in settings:
        return ("next-item",) if table.get("time") else ("retrieval",)
    cold, ranking = ({each.name for each in fields(kind)} for kind in (ExperimentConfig, RankingConfig))
    if table.get("blocks") or (table and settings.keys() <= ranking and not settings.keys() <= cold):
        return ("ranking",)
    return ("cold-start", "ranking") if table and settings.keys() <= _OF_BOTH else ("cold-start",)


_CONFIG = "config.json"
_OF_BOTH = {"label", "item", "seeds", "budget", "negatives"}
"""The settings that cold start and ranking share."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one experiment."""

    path: Path

    @property
    def data(self) -> Path:
        """The prepared data set, unless another folder is named."""
        return self.path / "data"

    def training(self, method: str, seed: int) -> Path:
        """Return the folder of one training run."""
        return self.path / method / f"seed-{seed}"

    @property
    def beside(self) -> RunFolder:
        """The run for ranking that is trained after one for cold start (`choose_families`)."""
        return RunFolder(self.path / "ranking")

    @property
    def begun(self) -> bool:
        """Whether a run has started in this folder."""
        return (self.path / _CONFIG).exists()

    @property
    def lock(self) -> FolderLock:
        """The lock that lets one job at a time train in this folder."""
        return FolderLock(self.path / FILE_NAME, f"{self.path} is trained")

    def begin(self, config: Config, data: Path) -> None:
        """Record the settings, or check that they equal those with which the run started.

        Raises:
          ConfigError: The folder holds a run with other settings or other data.
          GmetaError: The file can't be written.
        """
        file = self.path / _CONFIG
        begun = {
            "for": family_of(config),
            "data": str(data.resolve()),
            "data_digest": Manifest.load(data).digest,
            "experiment": to_mapping(config),
        }
        if file.exists():
            held = self._read(file)
            # Settings that didn't exist yet when the run started get their defaults.
            known = from_mapping(FAMILIES[held["for"]], _as_begun(held), where=str(file))
            differing = _differences(held | {"experiment": _plain(to_mapping(known))}, _plain(begun))
            if differing:
                raise ConfigError(
                    f"{self.path} was begun with other settings ({'; '.join(differing)}): "
                    f"name another --run, or delete {file.name} and the training folders beside it"
                )
            return
        with explain_write_errors(file):
            write_atomically(file, json.dumps(begun, indent=1) + "\n")

    def resume(self, config: ExperimentConfig) -> ExperimentConfig | None:
        """Return the experiment with the settings of methods that the run chose; None if it hasn't started.

        Args:
          config: The planned experiment, before the choice.

        Raises:
          ConfigError: The run is of another family.
          DataError: The saved settings can't be read.
        """
        if not self.begun:
            return None
        held, _ = self.load()
        if not isinstance(held, ExperimentConfig):
            raise ConfigError(f"{self.path} was begun for {self.family}: name another --run")
        chose = budget_seconds(config.budget) and held.budget == config.budget
        return replace(config, methods=held.methods) if chose else config

    def load(self, *, unchanged: bool = False) -> tuple[Any, Path]:
        """Read the settings, of a class of `FAMILIES`, and the data folder with which the run started.

        Args:
          unchanged: Whether the data must be those with which the run started: models identify ids by their
            position among the ids of training rows.

        Raises:
          DataError: No run has started here, or the data have been prepared again since.
        """
        file = self.path / _CONFIG
        if not file.exists():
            raise DataError("no run was begun here", path=self.path, advice="run `gmeta train` first")
        held = self._read(file)
        data = Path(held["data"])
        begun = held.get("data_digest")  # earlier versions wrote none
        if unchanged and begun and begun != Manifest.load(data, check_shards=False).digest:
            raise DataError(
                f"{data} was prepared again with other data after the run was begun",
                path=self.path,
                advice="prepare it as it was, or train in another --run",
            )
        return from_mapping(FAMILIES[held["for"]], _as_begun(held), where=str(file)), data

    def check_beside(self) -> None:
        """Check that the run in `beside` is for ranking, with this one's label and data.

        Raises:
          DataError: The run isn't, or the settings of either can't be read.
          ConfigError: The settings of either don't fit this gmeta.
        """
        (config, data), (ranking, source) = self.load(), self.beside.load()
        manifest = Manifest.load(data, check_shards=False)
        digests = {manifest.digest, *(manifest.config.get("inputs") or {}).values()}  # drawn data: source's
        differing = (
            "isn't for ranking"
            if not isinstance(ranking, RankingConfig)
            else f"predicts {ranking.label}, not {config.label}"
            if ranking.label != config.label
            else f"was trained on {source}, not {data}"
            if Manifest.load(source, check_shards=False).digest not in digests
            else ""
        )
        if differing:
            raise DataError(
                f"the run {differing}",
                path=self.beside.path,
                advice=f"evaluate it alone, or delete it and run `gmeta train --run {self.path}`",
            )

    @property
    def family(self) -> str:
        """The key of `FAMILIES` with which the run started.

        Raises:
          DataError: No run has started here.
        """
        return family_of(self.load()[0])

    @staticmethod
    def _read(file: Path) -> dict[str, Any]:
        try:
            held = parse_json(file.read_text())
        except ValueError as error:
            raise DataError(f"not JSON: {error}", path=file, advice="delete it to start over") from error
        if not isinstance(held, dict) or not {"data", "experiment"} <= held.keys():
            raise DataError("incomplete", path=file, advice="delete it to start over")
        if not isinstance(held["data"], str) or not isinstance(held["experiment"], dict):
            raise DataError("not what gmeta writes", path=file, advice="delete it to start over")
        held.setdefault("for", "cold-start")  # earlier versions had no other family
        if held["for"] not in FAMILIES:
            raise DataError(
                f"a run for {held['for']!r}, which this gmeta doesn't know",
                path=file,
                advice=f"it knows {', '.join(FAMILIES)}: install the gmeta that made it",
            )
        return held


def _as_begun(held: Mapping[str, Any]) -> Any:
    """Return the settings that a run saved, with the defaults of the time when it started."""
    experiment = held["experiment"]
    if held["for"] == "retrieval" and isinstance(experiment, dict):
        for method in (experiment.get("methods") or {}).values():
            method.setdefault("columns", False)
    return experiment


def _differences(held: Any, given: Any, where: str = "") -> list[str]:
    """List the settings that differ: ``"experiment.seeds is [0, 1], now [0]"``."""
    if held == given:
        return []
    if not (isinstance(held, dict) and isinstance(given, dict)):
        return [f"{where} is {_short(held)}, now {_short(given)}"]
    keys = sorted({*held, *given})
    inner = [_differences(held.get(key), given.get(key), f"{where}.{key}" if where else key) for key in keys]
    return [difference for differences in inner for difference in differences]


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_LONGEST = 60


def _plain(value: Any) -> Any:
    """Convert a value to the form that JSON reads back: tuples become lists."""
    return json.loads(json.dumps(value))
