"""The settings of an inner loop: the algorithm, the number of steps, and which weights adapt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError, finite_number, whole_number
from gmeta.meta.adaptation import (
    SGD,
    Adam,
    Adaptation,
    InnerOptimizer,
    Momentum,
    OptimizerName,
    Rates,
    inner_optimizer,
)

# The settings of the prior with which ridge regression solves for a head.


@dataclass(frozen=True)
class HeadPrior:
    r"""How the learned prior of ``InnerLoop("ridge")`` starts, and how fast it moves.

    A variance is :math:`v = e^{p \theta}`, and so is the noise; the outer loop learns :math:`\theta`, which
    begins where v is :math:`v_0`. Adam moves a number by about its rate in a step, so p says how fast
    variances move beside weights.

    Attributes:
      variance: :math:`v_0` of all features; None: 1 / features for the kernel, 1 for the bias.
      noise: :math:`v_0` of the noise, by which the support loss is divided.
      pace: p.
      likelihood: Whether the outer loss of a squared error is the negative log-likelihood of the query's
        labels under the variances that ridge predicts (`gmeta.models.meta.ridge_steps`). Then
        variances are true to scale, which a squared error alone doesn't teach; what is predicted hardly
        changes. A logistic loss is a negative log-likelihood as it is, and stays. Training reports this loss,
        and evaluation the squared error.
      unadapted: The weight, beside 1, that the outer loss gives to the same samples as predicted before
        adaptation. The loss after adaptation alone hardly teaches the prior's mean: support samples correct
        any mean whose variance is large. With a weight of 0, predictions for tasks without support samples
        are therefore arbitrary. Training reports the loss after adaptation.

    Raises:
      ConfigError: ``variance``, ``noise`` or ``pace`` isn't above 0, ``unadapted`` is below 0, or
        ``likelihood`` isn't True or False.

    Example:
      >>> HeadPrior(variance=1.0, pace=0.2).noise
      1.0
    """

    variance: float | None = None
    noise: float = 1.0
    pace: float = 1.0
    likelihood: bool = False
    unadapted: float = 0.03

    def __post_init__(self) -> None:
        for name in ("variance", "noise", "pace"):
            value = getattr(self, name)
            if value is not None and finite_number(f"head prior: {name}", value) <= 0:
                raise ConfigError(f"head prior: {name} must be above 0, got {value}")
        if finite_number("head prior: unadapted", self.unadapted) < 0:
            raise ConfigError(f"head prior: unadapted must be at least 0, got {self.unadapted}")
        if not isinstance(self.likelihood, bool):
            raise ConfigError(f"head prior: likelihood must be True or False, got {self.likelihood!r}")


Algorithm = Literal["maml", "fomaml", "anil", "boil", "reptile", "meta-sgd", "ridge"]
LearnedRates = Literal["layer", "parameter"]

ALL = "all"
"""The value of ``adapt`` that means every layer and the embedding rows."""

EMBEDDINGS = "embeddings"
"""The name in ``adapt`` that means the embedding rows."""

_FIRST_ORDER = ("fomaml", "reptile")


@dataclass(frozen=True)
class InnerLoop:
    r"""A task's adaptation: ``steps`` times :math:`\theta \leftarrow \theta - \alpha \nabla L_{support}`.

    ============  =====  ===========================  =======================================================
    algorithm     order  adapts, unless said          outer gradient
    ============  =====  ===========================  =======================================================
    ``maml``      2      every layer                  of the adapted weights' query loss, through the steps
    ``fomaml``    1      every layer                  the same, with inner gradients taken for constants
    ``anil``      2      the last layer (the head)    as MAML's
    ``boil``      2      every layer but the last     as MAML's
    ``meta-sgd``  2      every layer                  as MAML's, and of a rate α of each single parameter
    ``reptile``   1      every layer, embedding rows  :math:`(\theta - \theta') / \alpha`, all samples support
    ``ridge``     2      the last layer (the head)    as MAML's, through the solution, and of prior and noise
    ============  =====  ===========================  =======================================================

    ``ridge`` takes no gradient steps of the head: it solves for it. The shared head is the mean of a Gaussian
    prior, whose variances are learned (`gmeta.meta.ridge`). For squared error one step is exact; for a
    logistic loss a step is one of Newton's, and four are enough. Layers and rows that ``adapt`` names beside
    the head take a gradient step before each solution.

    All algorithms train weights to adapt from. Only ``ridge`` (`HeadPrior.unadapted`) and training with
    ``steps=0`` teach the shared weights to predict without adaptation too; those of the others may predict
    anything until they have adapted.

    MAML and its first-order form: Finn et al., "Model-Agnostic Meta-Learning" (ICML 2017), section 2.2 and
    5.2. ANIL: Raghu et al., "Rapid Learning or Feature Reuse?" (ICLR 2020), section 4. BOIL: Oh et al. (ICLR
    2021), section 3. Meta-SGD: Li et al. (2017), algorithm 1. Reptile: Nichol et al., "On First-Order
    Meta-Learning Algorithms" (2018), algorithm 2. Ridge: Bertinetto et al., "Meta-learning with
    differentiable closed-form solvers" (ICLR 2019), section 3. Embedding rows in the inner loop: G-Meta,
    sections 2.1.1 and 2.1.2.

    Attributes:
      algorithm: One of the above.
      steps: Gradient steps in training. 0 trains without adaptation.
      learning_rate: The inner rate α; if rates are learned, their initial value.
      order: 2 differentiates the outer loss through the inner gradients; 1 treats them as constants. None:
        the algorithm's order. First order saves the Hessian-vector products and is a different algorithm: on
        MovieLens-100K at α = 5e-3 it diverges where second order doesn't.
      adapt: Names of the layers whose weights adapt. ``"embeddings"`` among them means the embedding rows;
        ``"all"`` means every layer and the embedding rows. None: as in the table; for a `gmeta.layers.MLP`,
        the layers in its own ``adapt``.
      learn_learning_rate: ``"layer"``: the outer loop learns a rate for each layer and for each table.
        ``"parameter"``: it learns a rate for each number; for embedding rows, one for each column. None: α
        stays constant.
      optimizer: ``"sgd"``, ``"momentum"``, ``"adam"``, or one of `gmeta.meta`'s optimizers with settings.
      clip_norm: Maximum norm of a task's inner gradient.
      clip_value: Maximum magnitude of each number in the inner gradient.
      evaluation_steps: Gradient steps in evaluation; None means ``steps``.
      serving_steps: Gradient steps of ``model.adapt`` and of an exported model; None: as in evaluation.
      recompute: Compute a step's activations again for the outer gradient, instead of keeping the activations
        of all steps; see `gmeta.meta.adaptation.Adaptation`.
      prior: How ridge's prior starts, and how fast it moves; None: `HeadPrior()`.

    Raises:
      ConfigError: Settings are invalid, alone or together.

    Example:
      >>> InnerLoop(steps=1, learning_rate=5e-3).order
      2
      >>> InnerLoop("anil", steps=5, evaluation_steps=10).algorithm
      'anil'
    """

    algorithm: Algorithm = "maml"
    steps: int = 1
    learning_rate: float = 0.01
    order: int | None = None
    adapt: tuple[str, ...] | str | None = None
    learn_learning_rate: LearnedRates | None = None
    optimizer: OptimizerName | SGD | Momentum | Adam | InnerOptimizer = "sgd"
    clip_norm: float | None = None
    clip_value: float | None = None
    evaluation_steps: int | None = None
    serving_steps: int | None = None
    recompute: bool = False
    prior: HeadPrior | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            known = ", ".join(get_args(Algorithm))
            raise ConfigError(f"inner loop: algorithm must be one of {known}, got {self.algorithm!r}")
        for name in ("steps", "evaluation_steps", "serving_steps"):
            number = getattr(self, name)
            if number is not None or name == "steps":
                self._settle(name, whole_number(f"inner loop: {name}", number))
        first_order = self.algorithm in _FIRST_ORDER
        if self.order not in ((1, None) if first_order else (1, 2, None)):
            allowed = f"1 for {self.algorithm}" if first_order else "1 (FOMAML) or 2 (MAML)"
            raise ConfigError(f"inner loop: order must be {allowed}, got {self.order}")
        if self.learn_learning_rate not in (None, *get_args(LearnedRates)):
            raise ConfigError(
                f"inner loop: learn_learning_rate must be 'layer', 'parameter' or None, got "
                f"{self.learn_learning_rate!r}"
            )
        for name in ("clip_norm", "clip_value"):
            limit = getattr(self, name)
            if limit is not None and finite_number(f"inner loop: {name}", limit) <= 0:
                raise ConfigError(f"inner loop: {name} must be above 0, got {limit}; None sets no limit")
        self._settle("learning_rate", self._rate())
        if not isinstance(self.recompute, bool):
            raise ConfigError(f"inner loop: recompute must be True or False, got {self.recompute!r}")
        if self.algorithm == "reptile" and (self.learn_learning_rate or not self.steps * self.learning_rate):
            raise ConfigError(
                "inner loop: Reptile learns no rates, and learns nothing at all in 0 steps or at a rate of 0"
            )
        self._settle("order", self.order or (1 if first_order else 2))
        self._settle("adapt", self._adapt())
        if self.algorithm == "meta-sgd":
            self._settle("learn_learning_rate", self.learn_learning_rate or "parameter")
        inner_optimizer(self.optimizer)
        if not isinstance(self.prior, HeadPrior | None) or (self.prior and self.algorithm != "ridge"):
            raise ConfigError(
                f"inner loop: prior is a gmeta.meta.HeadPrior, of ridge alone, got {self.prior!r} for "
                f"{self.algorithm}"
            )
        if self.learns_variance and not self.steps:
            raise ConfigError(
                "inner loop: HeadPrior(likelihood=True) learns from what solved heads predict, got steps=0: "
                "take a step, or leave likelihood out"
            )
        if self.algorithm == "ridge" and self.adapt is None:
            self._refuse_gradient_settings()

    def _refuse_gradient_settings(self) -> None:
        """Refuse what says how gradient steps are taken, where there are none."""
        others = ("learning_rate", "learn_learning_rate", "optimizer", "clip_norm", "clip_value", "recompute")
        defaults = {each.name: each.default for each in fields(self)}
        given = [name for name in others if getattr(self, name) != defaults[name]]
        if given:
            raise ConfigError(
                f"inner loop: ridge solves for the head and takes no gradient steps, so {', '.join(given)} "
                "would do nothing: leave it out, or name what is to take steps in adapt"
            )

    def _rate(self) -> float:
        """Return the inner rate, a fixed number: only the outer loop may change it during training."""
        try:
            rate = finite_number("inner loop: learning_rate", self.learning_rate)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; learn_learning_rate='layer' or 'parameter' has the outer loop change it"
            ) from error
        if rate < 0:
            raise ConfigError(f"inner loop: learning_rate can't be negative, got {rate}")
        return rate

    def _adapt(self) -> tuple[str, ...] | str | None:
        if self.adapt is None:
            return ALL if self.algorithm == "reptile" else None
        if self.adapt == ALL:
            return ALL
        given: Any = (self.adapt,) if isinstance(self.adapt, str) else self.adapt
        names = tuple(given) if isinstance(given, Iterable) else (given,)
        if not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"inner loop: adapt must be names of layers, 'embeddings' among them, or 'all', got "
                f"{self.adapt!r}"
            )
        if not names:
            raise ConfigError("inner loop: adapt names nothing; for training without adaptation set steps=0")
        return tuple(dict.fromkeys(names))

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def adapted_layers(self, layers: tuple[str, ...], by_default: tuple[str, ...]) -> tuple[str, ...]:
        """Return which of a network's layers adapt.

        Args:
          layers: The layers that have weights, in the order of the forward pass.
          by_default: The layers that adapt by the network's own setting.

        Raises:
          ConfigError: ``adapt`` names a layer that doesn't exist, or no layer is left to adapt.
        """
        if self.adapt == ALL:
            return layers
        if self.adapt is not None:
            chosen = {layer for layer in layers if any(_is_in(layer, name) for name in self.adapt)}
            strange = [n for n in self.adapt if n != EMBEDDINGS and not any(_is_in(la, n) for la in layers)]
            if strange:
                raise ConfigError(
                    f"inner loop: adapt names {', '.join(strange)}, but the network's layers with weights "
                    f"are {', '.join(layers)}; besides there are 'embeddings', and adapt='all' for everything"
                )
            if self.algorithm == "ridge":
                chosen |= set(layers[-1:])
            return tuple(layer for layer in layers if layer in chosen)
        if self.algorithm in ("anil", "ridge"):
            return layers[-1:]
        if self.algorithm == "boil":
            if len(layers) < 2:
                raise ConfigError("inner loop: BOIL keeps the last layer, and the network has no other")
            return layers[:-1]
        return by_default

    @property
    def adapts_embeddings(self) -> bool:
        """Whether embedding rows adapt."""
        return self.adapt is not None and (self.adapt == ALL or EMBEDDINGS in self.adapt)

    def steps_in(self, use: Literal["training", "evaluation", "serving"]) -> int:
        """Return how many steps a task takes."""
        if use == "training":
            return self.steps
        evaluation = self.steps if self.evaluation_steps is None else self.evaluation_steps
        return evaluation if use == "evaluation" or self.serving_steps is None else self.serving_steps

    @property
    def unadapted(self) -> float:
        """The weight in the outer loss of samples as predicted before adaptation; see `HeadPrior`."""
        return (self.prior or HeadPrior()).unadapted if self.algorithm == "ridge" and self.steps else 0.0

    @property
    def teaches_start(self) -> bool:
        """Whether the outer loop teaches the shared weights to predict without adaptation."""
        return not self.steps or bool(self.unadapted)

    @property
    def learns_variance(self) -> bool:
        """Whether the outer loss of a squared error is a likelihood under predicted variances."""
        return self.prior is not None and self.prior.likelihood

    def adaptation(self, rates: Rates | None = None, order: int | None = None) -> Adaptation:
        """Return the `Adaptation` that takes the steps.

        Args:
          rates: Rates in place of ``learning_rate``, such as learned ones.
          order: The order in place of the loop's own.
        """
        return Adaptation(
            self.learning_rate if rates is None else rates,
            order or self.order or 2,
            inner_optimizer(self.optimizer),
            self.clip_norm,
            self.clip_value,
            self.recompute and order != 1,
        )


def _is_in(layer: str, name: str) -> bool:
    """Return whether a layer has the given name or is part of the layer with that name."""
    return layer == name or layer.startswith(f"{name}/")


# Reduces losses of samples to losses of tasks, and these to one loss, without any effect of padding.

Reduction = Literal["task", "sample"]


def task_means(losses: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    r"""Compute each task's mean loss over its real samples, :math:`\sum_s m_{ts} l_{ts} / \sum_s m_{ts}`.

    Args:
      losses: (tasks, samples), padded. Values in the padding have no effect, not even NaN.
      mask: (tasks, samples): 1 for a real sample, 0 for padding.

    Returns:
      (tasks,). A task without samples has loss 0 and so no gradient.
    """
    mask = tf.cast(mask, losses.dtype)
    total = tf.reduce_sum(tf.where(mask > 0, losses * mask, 0), axis=-1)
    return tf.math.divide_no_nan(total, tf.reduce_sum(mask, axis=-1))


def reduce_tasks(losses: tf.Tensor, mask: tf.Tensor, reduction: Reduction = "sample") -> tf.Tensor:
    """Reduce many tasks' query losses to one loss.

    Args:
      losses: (tasks, samples), padded.
      mask: (tasks, samples): 1 for a real sample, 0 for padding.
      reduction: ``"sample"`` is the mean over all real samples of all tasks, so that a task counts by
        its size; ``"task"`` is the mean over tasks of each task's mean, so that all tasks count alike.

    Returns:
      A scalar; 0 if there is no real sample at all.

    Raises:
      ConfigError: ``reduction`` has another value.
    """
    mask = tf.cast(mask, losses.dtype)
    if reduction == "task":
        real = tf.cast(tf.reduce_any(mask > 0, axis=-1), losses.dtype)
        return tf.math.divide_no_nan(tf.reduce_sum(task_means(losses, mask)), tf.reduce_sum(real))
    if reduction == "sample":
        return tf.math.divide_no_nan(tf.reduce_sum(tf.where(mask > 0, losses * mask, 0)), tf.reduce_sum(mask))
    raise ConfigError(f"reduction must be 'task' or 'sample', got {reduction!r}")
