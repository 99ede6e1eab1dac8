"""The settings of a cold-start experiment: several methods, several seeds, one evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gmeta.core.errors import ConfigError
from gmeta.meta import InnerLoop


@dataclass(frozen=True)
class MethodConfig:
    """How one network is trained.

    Attributes:
      label: Its name in tables and pictures.
      description: One sentence on what it is.
      inner: The inner loop; ``steps = 0`` trains without adaptation.
      outer_samples: Which samples the outer loss is over, ``"query"`` or ``"all"``.
      learning_rate: Adam's rate in the outer loop, for dense weights and embedding rows alike.
      epochs: Passes over the warm tasks.
    """

    label: str
    description: str
    inner: InnerLoop = field(default_factory=InnerLoop)
    outer_samples: Literal["query", "all"] = "query"
    learning_rate: float = 1e-3
    epochs: int = 10

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.learning_rate <= 0:
            raise ConfigError(
                f"method {self.label!r}: epochs must be at least 1 and learning_rate above 0, "
                f"got {self.epochs} and {self.learning_rate}"
            )


def _methods() -> dict[str, MethodConfig]:
    rate = 5e-3
    return {
        "maml": MethodConfig(
            "MAML",
            "MeLU trained by second-order MAML: the decision layers adapt in the inner loop.",
            InnerLoop(steps=1, learning_rate=rate, order=2),
            learning_rate=5e-3,
        ),
        "joint": MethodConfig(
            "joint training",
            "The same network trained on all ratings of the warm users without an inner loop; "
            "its steps are fine-tuning.",
            InnerLoop(steps=0, learning_rate=rate),
            outer_samples="all",
            learning_rate=1e-3,
            epochs=12,
        ),
    }


@dataclass(frozen=True)
class ExperimentConfig:
    """A cold-start experiment.

    Attributes:
      seeds: One training run a seed and method: initial weights, initial rows and the order of tasks.
      tasks_per_batch: Tasks in one step.
      query: A task's last ``query`` samples are its query set, the ones before are its support set.
      embedding_dim: Width of every embedding.
      hidden: Units of the hidden layers.
      evaluation_steps: Inner steps after which cold tasks are measured.
      support_sizes: How many of a cold task's latest support samples it may see, for the curve of error
        against support size; a task that has fewer shows all it has.
      support_steps: Inner steps for that curve.
      methods: Method name -> how it is trained.

    Example:
      A TOML file names what differs from these defaults::

        seeds = [0, 1, 2]
        [methods.maml]
        label = "MAML"
        description = "second order, five steps"
        inner = { steps = 5, learning_rate = 5e-3 }
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    tasks_per_batch: int = 32
    query: int = 10
    embedding_dim: int = 32
    hidden: tuple[int, ...] = (64, 64)
    evaluation_steps: tuple[int, ...] = (0, 1, 3, 5)
    support_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    support_steps: int = 5
    methods: Mapping[str, MethodConfig] = field(default_factory=_methods)

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds must be given, each once, got {list(self.seeds)}")
        if min(self.tasks_per_batch, self.query, self.embedding_dim, *self.hidden, *self.support_sizes) < 1:
            raise ConfigError(
                "tasks_per_batch, query, embedding_dim, hidden and support_sizes must be at least 1"
            )
        if not self.evaluation_steps or min(*self.evaluation_steps, self.support_steps) < 0:
            raise ConfigError(f"evaluation_steps must be given and not negative, got {self.evaluation_steps}")
        if not self.methods:
            raise ConfigError("an experiment needs at least one method")
