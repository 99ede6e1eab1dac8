"""A fully trained run: its methods and baselines, and the file of the choices by validation."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import explain_write_errors, write_atomically
from gmeta.core.json_values import parse_json
from gmeta.experiment.plan.next_item_config import BLEND
from gmeta.experiment.runs.run_folder import RunFolder

CHOSEN = "chosen.json"
"""The settings of the baselines and the weights of the blends, by validation."""


@dataclass(frozen=True)
class TrainedRun:
    """A trained run, ready to score.

    Attributes:
      config: Its settings.
      baselines: Name -> the fitted baseline.
      described: Name of a baseline or of the blend -> its settings as part of a sentence.
      methods: Method -> seed -> its scorer; the blend is among them.
      validation: Method or baseline -> its value in validation, which determines the best. The blend's few
        weights are fitted to the same data.
    """

    HIGHER: ClassVar[bool]
    """Whether a higher value in validation is better."""
    LABELS: ClassVar[Mapping[str, str]]
    """Baseline -> what tables call it."""

    config: Any
    baselines: Mapping[str, Any]
    described: Mapping[str, str]
    methods: Mapping[str, Mapping[int, Any]]
    validation: Mapping[str, float]

    @property
    def best(self) -> str:
        """The method or baseline that is best in validation."""
        return (max if self.HIGHER else min)(self.validation, key=self.validation.__getitem__)

    def label(self, name: str) -> str:
        """Return the name of a method or a baseline in tables."""
        if name == BLEND:
            return "blend of all"
        own = self.config.methods.get(name)
        return str(own.label if own else self.LABELS[name])

    def choose(self, name: str | None, seed: int | None) -> tuple[str, Any]:
        """Return the name and the scorer of a method or a baseline.

        Args:
          name: Which one; None: the best in validation, a method or a baseline.
          seed: Which of its seeds; None: the first. Baselines have no seeds.

        Raises:
          ConfigError: There is no such method or seed.
        """
        known = [*self.methods, *self.baselines]
        name = self.best if name is None else name
        if name not in known:
            raise ConfigError(f"the run has no method {name!r}; it has {', '.join(known)}")
        if name in self.baselines:
            if seed is not None:
                raise ConfigError(f"{name} is a baseline, which has no seed: leave seed {seed} out")
            return name, self.baselines[name]
        seeds = self.methods[name]
        seed = next(iter(seeds)) if seed is None else seed
        if seed not in seeds:
            raise ConfigError(f"the run has no seed {seed}; it has {', '.join(map(str, seeds))}")
        return name, seeds[seed]


def save_chosen(run: RunFolder, chosen: Mapping[str, Any]) -> None:
    """Write the choices by validation, as JSON values."""
    with explain_write_errors(run.path / CHOSEN):
        write_atomically(run.path / CHOSEN, json.dumps(chosen, indent=1) + "\n")


@contextlib.contextmanager
def read_chosen(run: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield what `save_chosen` wrote, and explain errors that its use raises in the block.

    Raises:
      DataError: The run isn't fully trained, or gmeta didn't write the file.
    """
    file = run.path / CHOSEN
    try:
        yield parse_json(file.read_text())
    except FileNotFoundError as error:
        raise DataError(
            "training isn't over", path=run.path, advice="run `gmeta train` again to finish"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"not what gmeta writes: {error}", path=file, advice="delete it, and run `gmeta train` again"
        ) from error
