"""The training settings of one method of an experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gmeta.core.errors import ConfigError
from gmeta.meta import InnerLoop
from gmeta.models.zoo.factor_model import FACTOR_LOOP, FactorSettings

FACTORS = "factor_ridge"
"""The model that takes a method's ``factors`` and an experiment's ``labels`` and ``task_columns``."""


@dataclass(frozen=True)
class MethodConfig:
    """The training settings of one method.

    Attributes:
      label: Its name in tables and figures.
      description: One sentence that describes it.
      inner: The inner loop; ``steps = 0`` trains without adaptation.
      outer_samples: Which samples the outer loss covers, ``"query"`` or ``"all"``.
      learning_rate: Adam's rate in the outer loop.
      row_learning_rate: Adam's rate for the embedding rows; None: the same. A row is updated only in steps
        that read it. So the row of a rare id takes far fewer steps than a dense weight does, and fewer than
        it would with an Adam that updates every row in every step.
      schedule: ``"constant"``; or ``"one_cycle"``: the rate rises and falls over all epochs, as
        `gmeta.optimizers.OneCycle` does. ``row_learning_rate``, if given, stays constant.
      epochs: Passes over the training tasks.
      query: The query set of a training task, if it differs from the experiment's: a number of rows, or a
        share of the task's. A ridge head learns most if most rows are query rows.
      model: One of `gmeta.experiment.runs.model_choice.MODELS`.
      factors: Sizes and priors of the model ``"factor_ridge"``; other models don't take them.
    """

    label: str
    description: str
    inner: InnerLoop = field(default_factory=InnerLoop)
    outer_samples: Literal["query", "all"] = "query"
    learning_rate: float = 1e-3
    row_learning_rate: float | None = None
    schedule: Literal["constant", "one_cycle"] = "constant"
    epochs: int = 10
    query: int | float | None = None
    model: str = "melu"
    factors: FactorSettings = field(default_factory=FactorSettings)

    def __post_init__(self) -> None:
        rates = [rate for rate in (self.learning_rate, self.row_learning_rate) if rate is not None]
        if self.epochs < 1 or min(rates) <= 0:
            raise ConfigError(
                f"method {self.label!r}: epochs must be at least 1 and learning rates above 0, "
                f"got {self.epochs} and {rates}"
            )
        if self.query is not None:
            check_share(f"method {self.label!r}: query", self.query)
        if self.model != FACTORS and self.factors != FactorSettings():
            raise ConfigError(
                f"method {self.label!r}: factors are the settings of the model {FACTORS!r}, and this one is "
                f"{self.model!r}: leave them out"
            )


def check_share(what: str, query: int | float) -> None:
    """Require that a query set is a number of rows or a share of a task's rows.

    Raises:
      ConfigError: The value isn't above 0, or is a float of 1 or more.
    """
    if query <= 0 or (isinstance(query, float) and query >= 1):
        raise ConfigError(f"{what} must be a number of rows or a share below 1, got {query}")


def _factors(epochs: int) -> MethodConfig:
    return MethodConfig(
        "factor model",
        "Items are vectors of their id and attributes; a task's head is solved for by ridge regression.",
        inner=FACTOR_LOOP,
        learning_rate=5e-3,
        schedule="one_cycle",
        epochs=epochs,
        query=0.7,
        model=FACTORS,
    )


def default_methods() -> dict[str, MethodConfig]:
    """Return the factor model, MAML and joint training, with settings for MovieLens-100K."""
    rate = 5e-3
    return {
        "factor_model": _factors(25),
        "maml": MethodConfig(
            "MAML",
            "MeLU trained by second-order MAML: the decision layers adapt in the inner loop.",
            inner=InnerLoop(steps=1, learning_rate=rate, order=2),
            learning_rate=5e-3,
        ),
        "joint": MethodConfig(
            "joint training",
            "The same network trained on all ratings of the warm users without an inner loop; "
            "its steps are fine-tuning.",
            inner=InnerLoop(steps=0, learning_rate=rate),
            outer_samples="all",
            learning_rate=1e-3,
            epochs=12,
        ),
    }


_STEPS = 1500


def own_methods(steps_per_epoch: int) -> dict[str, MethodConfig]:
    """Return the same methods for the user's own data, with enough epochs for about 1,500 steps.

    The number of epochs is at least 3, and at most 40 for the factor model and 20 for the others.

    Args:
      steps_per_epoch: The number of steps in an epoch.
    """
    epochs = min(max(-(-_STEPS // max(steps_per_epoch, 1)), 3), 40)
    fewer = min(epochs, 20)  # with more, the networks overfit small data
    inner = InnerLoop(steps=2, learning_rate=0.1, order=2)
    return {
        "factor_model": _factors(epochs),
        "maml": MethodConfig(
            "MAML",
            "Trained by second-order MAML: the decision layers adapt to a task in the inner loop.",
            inner=inner,
            learning_rate=5e-3,
            epochs=fewer,
        ),
        "joint": MethodConfig(
            "joint training",
            "The same network trained on all rows without an inner loop; its steps are fine-tuning.",
            inner=InnerLoop(steps=0, learning_rate=0.1),
            outer_samples="all",
            learning_rate=2e-3,
            epochs=fewer,
        ),
    }
