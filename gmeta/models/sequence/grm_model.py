"""GRM: a model that ranks users' exposures by sequences of their actions, for several tasks at once.

As in MTGenRec, section 2 and appendix A, a user's features are computed once for all of its exposures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig, MMoE
from gmeta.layers.task_heads import TaskHeads
from gmeta.losses import MultiTaskBCE
from gmeta.metrics import AUC, UserGAUC
from gmeta.models.sequence.exposure_trunk import ExposureTrunk, LabelMetrics, make_backbone
from gmeta.models.sequence.sequence_columns import Batch, Layout, SequenceColumns
from gmeta.ops import AttentionMask, jagged
from gmeta.optimizers import SparseOptimizer
from gmeta.training.compile_settings import only_columns
from gmeta.training.model import Model
from gmeta.training.rank_steps import rank_step

_LAYERS = ("collection", "backbone", "mixture", "heads")
_HORIZON = 3600.0  # an hour, in seconds


@tf.keras.saving.register_keras_serializable("gmeta")
class GRM(Model):
    r"""A model of contexts, history and exposures as one sequence, with experts and a tower for each task.

    .. math::
       H = \mathrm{trunk}([contexts \mid history \mid targets]), \quad
       a = \mathrm{heads}(\mathrm{MMoE}(H)), \quad
       L = \sum_t w_t \frac{1}{N} \sum_{i=1}^{N} \mathrm{BCE}(y_{ti}, p_{ti})

    N counts all exposures of the step, of all users and ranks, in any number of sequences. The probability of
    a product, :math:`p_\mathrm{ctcvr} = p_\mathrm{ctr} p_\mathrm{cvr}`, is trained on all exposures
    (`gmeta.losses.MultiTaskBCE`). One lookup embeds a whole batch; see
    `gmeta.models.sequence.exposure_trunk.ExposureTrunk` for the sequence, and
    `gmeta.models.sequence.sequence_columns` for the format of a batch.

    A prediction is {task or product: ragged (users, None)}, the logits of the users' exposures. The metrics
    of each label are its loss, ``auc_{task}`` and ``gauc_{task}``, measured exactly and over all ranks, and
    the metrics passed to `compile`; AUC and GAUC are computed at the end of an evaluation.
    ``{mixture}/{task}/importance_cv2`` and ``.../load_cv2`` report how evenly experts are used
    (`gmeta.layers.MMoE`).

    Args:
      collection: The embeddings. A feature of both events and exposures has the same name in both.
      backbone: As for `ExposureTrunk`.
      mixture: The experts; their tasks must be those of the towers.
      heads: The towers, and products of their probabilities.
      contexts: Features of the user.
      history: Features of an event, including the user's action; a label of exposures can be the action.
      targets: Features of an exposure.
      labels: Task or product -> the column of its label. A task without a label, such as CVR, is trained only
        in a product.
      dim: d, the width of a token.
      weights: Task or product -> its weight in the loss; others have weight 1.
      time: As for `SequenceColumns`.
      scenario: As for `SequenceColumns`.
      scenarios: The number of scenarios.
      combine: As for `ExposureTrunk`.
      dropout: As for `ExposureTrunk`.
      seed: The seed of everything outside the given layers.

    Raises:
      ConfigError: The parts don't go together.

    Example:
      >>> model = GRM.of(
      ...     [FeatureConfig("city", dim=8), FeatureConfig("item", dim=16), FeatureConfig("action", dim=4)],
      ...     contexts=["city"],
      ...     history=["item", "action"],
      ...     targets=["item"],
      ...     time="time",
      ...     dim=32,
      ... )
      >>> model.compile("adam")
      >>> batch = {
      ...     "task": tf.constant([7]),
      ...     "contexts": {"city": tf.constant([3])},
      ...     "history": {
      ...         name: tf.ragged.constant([[5, 8]], tf.int64) for name in ("item", "action", "time")
      ...     },
      ...     "targets": {name: tf.ragged.constant([[9, 9, 9]], tf.int64) for name in ("item", "time")},
      ... }
      >>> {name: logits.shape for name, logits in model.predict(batch, verbose=0).items()}
      {'ctr': TensorShape([1, None]), 'cvr': TensorShape([1, None]), 'ctcvr': TensorShape([1, None])}
    """

    refused_settings: ClassVar[Mapping[str, str]] = {
        **Model.refused_settings,
        "loss": "it is the cross-entropy of the labels that the model was made with, labels=",
        "loss_weights": "weigh labels where the model is made, by weights={label: weight}",
        "weighted_metrics": "exposures have no weights; give metrics=",
    }

    def __init__(
        self,
        collection: EmbeddingCollection,
        backbone: tf.keras.layers.Layer,
        mixture: MMoE,
        heads: TaskHeads,
        *,
        contexts: Sequence[str],
        history: Sequence[str],
        targets: Sequence[str],
        labels: Mapping[str, str],
        dim: int,
        weights: Mapping[str, float] | None = None,
        time: str | None = None,
        scenario: str | None = None,
        scenarios: int = 1,
        combine: Literal["concat", "sum"] = "concat",
        dropout: float = 0.0,
        seed: int = 0,
        name: str = "grm",
    ) -> None:
        super().__init__(name=name)
        self.columns = SequenceColumns(contexts, history, targets, time, scenario)  # type: ignore[arg-type]
        self.columns.check(collection)
        self._check(mixture, heads, labels)
        self.collection, self.mixture, self.heads = collection, mixture, heads
        self.labels = dict(labels)
        self.loss_of = MultiTaskBCE(
            {task: heads.products.get(task, (task,)) for task in labels}, weights=weights
        )
        self.trunk = ExposureTrunk(
            backbone,
            self.columns,
            {feature.name: feature.width for feature in collection.features},
            dim=dim,
            combine=combine,
            scenarios=scenarios,
            dropout=dropout,
            seed=seed,
        )
        self.mean = tf.keras.metrics.Mean(name="loss")
        self.means = {task: tf.keras.metrics.Mean(name=f"{task}_loss") for task in labels}
        self.aucs = {
            task: (AUC(0.5, name=f"auc_{task}"), UserGAUC(0.5, name=f"gauc_{task}")) for task in labels
        }
        self._of_compile = LabelMetrics(name, list(labels), None, [])
        self._build()

    def _build(self) -> None:
        """Create all weights now: a model needs them before weights can be loaded."""
        offsets, no_times = tf.zeros([1], tf.int64), tf.zeros([0], tf.int64)
        nothing = Layout(offsets, offsets, *([no_times] * 2 if self.columns.time is not None else []))
        vectors = {name: tf.zeros([0, width]) for name, width in self.trunk.widths.items()}
        self.heads(self.mixture(self.trunk(vectors, nothing)))
        for metric in self.metrics:
            metric.reset_state()
        self.built = True

    def _check(self, mixture: MMoE, heads: TaskHeads, labels: Mapping[str, str]) -> None:
        if set(heads.tasks) != set(mixture.tasks):
            raise ConfigError(
                f"{self.name}: the mixture is for {', '.join(mixture.tasks)}, the heads for "
                f"{', '.join(heads.tasks)}: they must be the same tasks"
            )
        strange = [task for task in labels if task not in (*heads.tasks, *heads.products)]
        if strange or not labels:
            raise ConfigError(
                f"{self.name}: labels must be of {', '.join([*heads.tasks, *heads.products])}, got "
                f"{', '.join(strange) or 'none'}"
            )
        known = [column for column in labels.values() if column in self.columns.targets]
        if known:
            raise ConfigError(
                f"{self.name}: targets has {', '.join(known)}, which labels= are to predict: leave them out"
            )
        trained = {head for task in labels for head in heads.products.get(task, (task,))}
        idle = [task for task in heads.tasks if task not in trained]
        if idle:
            raise ConfigError(f"{self.name}: no label trains {', '.join(idle)}, alone or in a product")

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Compile as `gmeta.models.Model.compile` does, but with the loss of the labels.

        Args:
          optimizer: As in Keras.
          loss: None.
          metrics: Keras metrics of labels and probabilities, such as ``["accuracy"]``: one or several for
            every label, or label -> one or several. A result has the name ``{metric}_{label}``.
          *args: As in Keras.
          **kwargs: As for `gmeta.models.Model.compile`.

        Raises:
          ConfigError: A loss or weights are given, or metrics can't be measured; or as
            `gmeta.models.Model.compile`.
        """
        taken = [metric.name for metric in (*self._sums, *self._rank_metrics)]
        self._of_compile = LabelMetrics(self.name, list(self.labels), metrics, taken)
        super().compile(optimizer, loss, None, *args, **kwargs)  # Keras measures none of the metrics
        self._compile_config.config["metrics"] = metrics

    def call(self, x: Batch, training: bool | None = None) -> dict[str, tf.RaggedTensor]:
        """Compute task or product -> the logits of the exposures, ragged (users, None)."""
        logits, layout = self.logits(x, training)
        return {
            name: tf.RaggedTensor.from_row_splits(logit, layout.targets, validate=False)
            for name, logit in logits.items()
        }

    def logits(self, x: Batch, training: bool | None = None) -> tuple[dict[str, tf.Tensor], Layout]:
        """Compute task or product -> logits (exposures,) of all users one after another, and their layout."""
        layout = self.columns.layout(x)
        vectors = self.collection(self.ids(x), training=training)
        hidden = self.trunk(vectors, layout, training=training)
        return self.heads(self.mixture(hidden)), layout

    def ids(self, x: Batch) -> dict[str, Any]:
        """Return feature -> the ids of all parts of a batch, one after another, for one lookup."""
        return self.columns.ids(x, set(self.labels.values()))

    def unknown_history(self, x: Batch) -> tf.Tensor:
        """Count the ids in the features of each history that have no row of their own, (users,) int64.

        Args:
          x: A batch.
        """
        columns = self.columns.part_ids(x, "history", set(self.labels.values()))
        absent = [
            column._replace(values=tf.cast(~self.collection.has_rows(name, column.values), tf.int64))
            for name, column in columns.items()
        ]
        return tf.add_n([jagged.sums(each) for each in absent])

    def lookup_inputs(self, data: Any) -> list[tuple[EmbeddingCollection, Any]]:
        """Return the one lookup of a train step: of all parts of the batch."""
        return [(self.collection, self.ids(only_columns(self.name, data)))]

    def learn(self, data: Any) -> tuple[tf.Tensor, tf.Tensor, Callable[[], dict[str, tf.Tensor]]]:
        """Compute the mean loss over exposures, and their number."""
        x = only_columns(self.name, data)
        before = self.predict_before(lambda: self.logits(x, training=False)[0])
        logits, layout = self.logits(x, training=True)
        labels = self.columns.labels(x, self.labels)
        loss, means = self._loss(logits, labels)
        loss = tf.add_n([loss, *self.losses])

        def measure() -> dict[str, tf.Tensor]:
            if self.observer is not None:
                users = self.columns.users(x, layout) if "task" in x else None
                self.observer(x, labels, logits if before is None else before, None, users)
            self._count(loss, means, layout.exposures)
            self._of_compile.update(labels, logits)
            return self.get_metrics_result()

        return loss, layout.exposures, measure

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Compute losses, and keep the exposures to compute AUC and GAUC at the end of the evaluation."""
        x = only_columns(self.name, data)
        with rank_step(self, data) as step:
            logits, layout = self.logits(x, training=False)
            labels = self.columns.labels(x, self.labels)
            loss, means = self._loss(logits, labels)
            self._count(loss, means, layout.exposures)
            self._of_compile.update(labels, logits)
            users = self.columns.users(x, layout)
            for task, (auc, gauc) in self.aucs.items():
                auc.update_state(labels[task], logits[task])
                gauc.update_state(labels[task], logits[task], users)
            return step.end_forward(self.get_metrics_result())

    def _loss(
        self, logits: Mapping[str, tf.Tensor], labels: Mapping[str, tf.Tensor]
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        """Compute the weighted sum of the labels' mean losses, and the means."""
        means = self.loss_of.task_means(logits, labels)
        return tf.add_n([self.loss_of.weights[task] * mean for task, mean in means.items()]), means

    def _count(self, loss: tf.Tensor, means: Mapping[str, tf.Tensor], exposures: tf.Tensor) -> None:
        self.mean.update_state(loss, sample_weight=exposures)
        for task, mean in means.items():
            self.means[task].update_state(mean, sample_weight=exposures)

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The losses, the use of experts, the metrics of `compile`, AUC and GAUC, reset at each epoch."""
        return [*self._sums, *self._of_compile.metrics, *self._rank_metrics]

    @property
    def _sums(self) -> list[tf.keras.metrics.Metric]:
        return [self.mean, *self.means.values(), *self.mixture.metrics]

    @property
    def _rank_metrics(self) -> list[Any]:
        return [metric for pair in self.aucs.values() for metric in pair]

    def get_metrics_result(self) -> dict[str, tf.Tensor]:
        """Return all metrics except AUC and GAUC, which sort all samples once an evaluation is over."""
        return {metric.name: metric.result() for metric in (*self._sums, *self._of_compile.metrics)}

    def _validate_and_get_metrics_result(self, logs: Any) -> Any:
        found = super()._validate_and_get_metrics_result(logs)
        measured = [metric for metric in self._rank_metrics if metric.count > 0]
        return {**found, **{metric.name: float(metric.result()) for metric in measured}}

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this model, in a form that JSON can hold."""
        serialize, trunk = tf.keras.saving.serialize_keras_object, self.trunk
        layers = {"backbone": trunk.backbone, **{n: getattr(self, n) for n in _LAYERS if n != "backbone"}}
        return {
            **{name: serialize(layer) for name, layer in layers.items()},
            **self.columns.settings,
            "labels": dict(self.labels),
            "weights": self.loss_of.weights,
            **{name: getattr(trunk, name) for name in ("dim", "scenarios", "combine", "seed")},
            "dropout": trunk.drop.rate,
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> GRM:
        """Create the model that a config from `get_config` describes."""
        made = {
            part: tf.keras.saving.deserialize_keras_object(config[part], custom_objects) for part in _LAYERS
        }
        return cls(**{**config, **made})

    @classmethod
    def of(
        cls,
        features: Sequence[FeatureConfig],
        *,
        contexts: Sequence[str],
        history: Sequence[str],
        targets: Sequence[str],
        labels: Mapping[str, str] | None = None,
        time: str | None = None,
        dim: int = 64,
        backbone: Literal["hstu", "fuxi"] | tf.keras.layers.Layer = "hstu",
        blocks: int = 2,
        heads: int = 2,
        max_length: int = 1000,
        by_time: bool = False,
        window: int | None = None,
        horizon: float | Literal["auto"] | None = "auto",
        experts: int = 4,
        expert_units: Sequence[int] = (64,),
        top_k: int | None = None,
        sparse: bool | Literal["auto"] = "auto",
        tower_units: Sequence[int] = (32,),
        report: Literal["tasks", "experts"] | None = "tasks",
        dropout: float = 0.0,
        optimizer: SparseOptimizer | None = None,
        seed: int = 0,
        **options: Any,
    ) -> GRM:
        """Make a `GRM` with a tower for each label; ``ctcvr`` is the product of towers for CTR and CVR.

        Args:
          features: The features of all parts.
          contexts: As for `GRM`; so are history, targets and time.
          history: Features of an event.
          targets: Features of an exposure.
          labels: As for `GRM`; ``{"ctr": "click"}`` for a log of clicks alone. None: ``{"ctr": "click",
            "ctcvr": "buy"}``.
          time: The column of times; with it the backbone has a bias of times.
          dim: The width of a token; a head of the backbone has the width ``dim // heads``.
          backbone: ``"hstu"``, ``"fuxi"``, or a layer.
          blocks: The number of the backbone's blocks.
          heads: The number of the backbone's heads.
          max_length: The backbone's maximum length, about the length of sequences.
          by_time: Whether a token sees only events with an earlier time, for exposures that were shown while
            the history went on.
          window: How many events back a token sees in each block; None: all. With recent events alone,
            learning and attention are quicker.
          horizon: How old an event is, in the unit of the times, that HSTU sees well at the start
            (`gmeta.layers.HSTU`); it learns from there. ``"auto"``: 3600, an hour of seconds, for HSTU with a
            time column. None: HSTU starts as published, and finds recency later.
          experts: The number of experts.
          expert_units: Units of the experts' layers.
          top_k: The number of experts that an exposure uses for a task; None: all.
          sparse: Whether to compute only these, as for `gmeta.layers.MMoE`.
          tower_units: Units of the towers' hidden layers.
          report: As for `gmeta.layers.MMoE`.
          dropout: The dropout of tokens and in the backbone.
          optimizer: The tables' sparse optimizer. None: Adam at the Keras optimizer's rate.
          seed: The seed of the initial weights and rows.
          **options: As for `GRM`.

        Raises:
          ConfigError: The parts don't go together, or a horizon is given and nothing takes it.
        """
        adapts = backbone == "hstu" and time is not None
        if horizon not in ("auto", None) and not adapts:
            raise ConfigError(
                f"GRM.of: horizon={horizon!r} is of backbone='hstu' with a column of times: give both or "
                "neither"
            )
        if isinstance(backbone, str):
            backbone = make_backbone(
                backbone,
                dim=dim,
                blocks=blocks,
                heads=heads,
                max_length=max_length,
                timed=time is not None,
                mask=AttentionMask(by_time=by_time, window=window),
                horizon=(_HORIZON if adapts else None) if horizon == "auto" else horizon,
                dropout=dropout,
                seed=seed,
            )
        labels = {"ctr": "click", "ctcvr": "buy"} if labels is None else labels
        products = {"ctcvr": ("ctr", "cvr")} if "ctcvr" in labels else {}
        factors = [task for of_product in products.values() for task in of_product]
        tasks = list(dict.fromkeys([*factors, *(task for task in labels if task not in products)]))
        return cls(
            EmbeddingCollection(features, optimizer=optimizer, seed=seed),
            backbone,
            MMoE(
                tasks,
                experts=experts,
                units=expert_units,
                top_k=top_k,
                sparse=sparse,
                report=report,
                seed=seed,
                name="mixture",
            ),
            TaskHeads(tasks, units=tower_units, products=products, seed=seed, name="heads"),
            contexts=contexts,
            history=history,
            targets=targets,
            labels=labels,
            time=time,
            dim=dim,
            dropout=dropout,
            seed=seed,
            **options,
        )
