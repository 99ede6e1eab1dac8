"""The model that is trained on a stream, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.row_formats import RowDtype
from gmeta.core.settings import parse_duration
from gmeta.export.signature import Signature
from gmeta.initializers import Normal
from gmeta.io import join, stream
from gmeta.io.streams.event_stream import Stream
from gmeta.io.streams.late_labels import LOG_ODDS, WEIGHT
from gmeta.io.streams.records import Format
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import DCN
from gmeta.optimizers import Adagrad
from gmeta.policies import TTL

_USERS = ("user", "user_id", "userid", "uid")
_START = 0.05  # deviation of initial rows
_RATE = 0.001


@dataclass(frozen=True)
class Outcomes:
    """The log of outcomes, such as clicks, that label the rows of a stream (`gmeta.io.join`).

    Attributes:
      source: The log, as for `gmeta.io.stream`.
      key: The columns that a row and its outcomes have in common.
      within: How long after the row an outcome counts.
      lateness: How much later than its time an outcome may arrive.
      corrections: How long after that an outcome is still a correction.
      negatives: The share of negatives that is kept.
      time: The column of event times; None: the stream's.
      outcome: The column that is the label; None: 1.
    """

    source: str
    key: tuple[str, ...]
    within: str
    lateness: str = "0s"
    corrections: str = "0s"
    negatives: float = 1.0
    time: str | None = None
    outcome: str | None = None


@dataclass(frozen=True)
class OnlineConfig:
    """Settings of training on a stream.

    Attributes:
      source: The log, as for `gmeta.io.stream`.
      label: The column of labels, 0 or 1; of a stream with `outcomes`, the name of the answer. Empty, with
        `start`: that of the run.
      start: A trained model of a run for ranking that training begins with: ``RUN``, ``RUN/method`` or
        ``RUN/method/seed-0``. It decides `features`, `dim`, `hidden`, `cross` and how rows are trained
        (`gmeta.experiment.online.warm_start`). None: a new model.
      time: The column of event times; None: the broker's times.
      unit: The unit of a column of numbers.
      positive: The least label that is positive, such as 4 for ratings of 1 to 5. None: labels are 0 and 1.
      form: As for `gmeta.io.stream`.
      columns: The columns' types; None: inferred from the first rows, and then kept.
      idle: As for `gmeta.io.stream`.
      on_bad: As for `gmeta.io.stream`; it may change from call to call.
      outcomes: The log that has the labels; None: the stream has them.
      features: The columns that the model reads; None: all but the label, times, and the outcomes' key.
      users: The column of users, for GAUC; None: the first of user, user_id, userid and uid that exists.
      batch_size: Rows of a step on each rank.
      dim: The width of ids' vectors.
      hidden: The units of the perceptron's layers.
      cross: The number of cross layers.
      learning_rate: Adam's rate for dense weights; with `start`, for rows too. None: 0.001, or the run's.
      rows_rate: Adagrad's rate for rows.
      ttl: How long an unused row is kept, such as ``"30d"``; with `start`, a row of an id that the run didn't
        see. None: for ever.
      window: The windows of progressive metrics: a duration of event time, or a number of rows. None: ten
        minutes, or 20,000 rows of a stream with `outcomes`, whose examples aren't in order of time.
      stop_if: Rules on these windows by which training ends (`gmeta.metrics.guard`).
      fall_back_if: Rules by which weights fall back to the last checkpoint before the window.
      checkpoint_every: The time between checkpoints.
      publish_every: The time between deltas.
      dense_every: The time between deltas with dense weights.
      base_every: The time between SavedModels.
      row_dtype: How servers hold rows; the ``dtype`` of `gmeta.export.Publisher`.
      seed: The seed of initial weights and rows.
    """

    source: str
    label: str
    start: str | None = field(default=None, kw_only=True)
    time: str | None = None
    unit: str | None = None
    positive: float | None = None
    form: Format | None = None
    columns: dict[str, str] | None = None
    idle: str = "5s"
    on_bad: str = "raise"
    outcomes: Outcomes | None = None
    features: tuple[str, ...] | None = None
    users: str | None = None
    batch_size: int = 512
    dim: int = 16
    hidden: tuple[int, ...] = (64, 32)
    cross: int = 2
    learning_rate: float | None = None
    rows_rate: float = 0.05
    ttl: str | None = None
    window: str | int | None = None
    stop_if: tuple[str, ...] = ()
    fall_back_if: tuple[str, ...] = ()
    checkpoint_every: str = "10m"
    publish_every: str = "10s"
    dense_every: str = "1m"
    base_every: str = "1d"
    row_dtype: RowDtype = "float32"
    seed: int = 0

    @property
    def windows(self) -> str | int:
        """The windows of progressive metrics."""
        return self.window or ("10m" if self.outcomes is None else 20_000)

    def rate(self, usual: float = _RATE) -> float:
        """Return Adam's rate."""
        return usual if self.learning_rate is None else self.learning_rate

    @property
    def corrects(self) -> bool:
        """Whether some examples correct earlier ones."""
        return self.outcomes is not None and parse_duration(self.outcomes.corrections, "corrections") > 0

    def open(self, follow: bool) -> Stream:
        """Return the stream of examples."""
        common: dict[str, Any] = {"form": self.form, "idle": self.idle, "follow": follow, "poll": "0.05s"}
        common["on_bad"] = self.on_bad
        rows = stream(self.source, columns=self.columns, time=self.time, unit=self.unit, **common)
        if self.outcomes is None:
            return rows
        asked = self.outcomes
        found = stream(
            asked.source, time=asked.time or self.time, unit=self.unit if self.time else None, **common
        )
        return join(
            rows,
            found,
            key=asked.key,
            within=asked.within,
            lateness=asked.lateness,
            corrections=asked.corrections,
            negatives=asked.negatives,
            outcome=asked.outcome,
            label=self.label,
        )

    def complete(self, given: Stream) -> OnlineConfig:
        """Return the settings with the columns, features and users that a stream determines.

        Raises:
          ConfigError: A column is missing, or there is nothing to learn from.
        """
        columns = dict(given.sources[0].columns)
        names = given.schema.names
        if self.label not in names:
            raise ConfigError(
                f"label = {self.label!r} is no column of {self.source}, which has {', '.join(names)}"
            )
        taken = {self.label, self.time, WEIGHT, LOG_ODDS, *(self.outcomes.key if self.outcomes else ())}
        kind = columns.get(self.label, "float32")  # a join makes the label
        if kind not in ("int64", "float32"):
            raise ConfigError(
                f"label = {self.label!r} is {kind}, and a label is 0 or 1, or a number with positive=: write "
                "it as a number"
            )
        features = self.features or tuple(name for name in columns if name not in taken)
        for name in features:
            if name not in columns:
                raise ConfigError(
                    f"features: {name!r} is no column of {self.source}, which has {', '.join(columns)}"
                )
            if name == self.label or columns[name] == "timestamp" or columns[name] == "float32[]":
                raise ConfigError(
                    f"features: {name!r} is {columns[name]}, or the label, which can't be a feature"
                )
        if not any(columns[name].removesuffix("[]") in ("int64", "string") for name in features):
            raise ConfigError(f"{self.source} has no ids to learn from: one feature must be int64 or string")
        users = self.users or next((name for name in _USERS if name in features), None)
        if users is not None and columns.get(users) not in ("int64", "string"):
            raise ConfigError(f"users = {users!r} is {columns.get(users)}: name a column of ids")
        rate = self.rate()
        return replace(self, columns=columns, features=features, users=users, learning_rate=rate)


class OnlineModel(DCN):
    r"""DCN-v2 on the raw columns of a stream: ids of any range, texts by their hashes, and numbers.

    .. math:: \hat y = \sigma(\sum_f w_{x_f} + g(v_{x_1}, \dots, v_{x_n}, z))

    A row holds an id's weight w, which learns from its first events on, and its vector v; g is the network
    of `gmeta.models.DCN`. A number x counts as sign(x) log(1 + abs(x)), and a gap as 0. The bias of sampled
    negatives, ``log_odds``, is added to the logit in training alone.

    Args:
      config: Completed settings.

    Shapes:
      {column: (samples,), or ragged (samples, None)} -> (samples, 1) logits.
    """

    def __init__(self, config: OnlineConfig) -> None:
        columns = config.columns or {}
        kinds = {name: columns[name] for name in config.features or ()}
        eviction = None if config.ttl is None else TTL(seconds=parse_duration(config.ttl, "ttl"))

        def feature(name: str, kind: str) -> FeatureConfig:
            table = TableConfig(
                name,
                1 + config.dim,
                initializer=Normal(0.0, _START),
                optimizer=Adagrad(config.rows_rate),
                eviction=eviction,
            )
            hashes = kind.startswith("string")
            return FeatureConfig(name, table, "sqrtn" if kind.endswith("[]") else None, hash=hashes)

        ids = {name: kind for name, kind in kinds.items() if not kind.startswith("float")}
        numbers = [name for name in kinds if name not in ids]
        super().__init__(
            EmbeddingCollection([feature(*each) for each in ids.items()], seed=config.seed),
            floats=numbers,
            cross=config.cross,
            hidden=config.hidden,
            head="rating",
            seed=config.seed,
            name="online",
        )
        self.config, self.kinds, self.numbers = config, kinds, tuple(numbers)

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Compute the logits of samples, (samples, 1)."""
        scaled = {}
        for name in self.numbers:
            number = tf.cast(inputs[name], tf.float32)
            number = tf.where(tf.math.is_finite(number), number, 0.0)
            scaled[name] = tf.sign(number) * tf.math.log1p(tf.abs(number))
        rows = self.collection({feature.name: inputs[feature.name] for feature in self.collection.features})
        vectors = {name: row[..., 1:] for name, row in rows.items()}
        logits: tf.Tensor = self.network({**vectors, **scaled}, training=training)
        logits += tf.add_n([row[..., :1] for row in rows.values()])
        if training and LOG_ODDS in inputs:
            logits += inputs[LOG_ODDS][:, tf.newaxis]
        return logits

    def create_weights(self) -> None:
        """Create the dense weights, by a call on one row: an export needs them before training does."""
        row: dict[str, Any] = {}
        for name, kind in self.kinds.items():
            value = tf.zeros([1], tf.float32 if name in self.numbers else tf.int64)
            row[name] = tf.RaggedTensor.from_row_lengths(value, [1]) if kind.endswith("[]") else value
        self(row, training=False)

    def signature(self) -> Signature:
        """Return the exported model's request: the columns, to the probability and the logit of the label."""
        specs: dict[str, tf.TypeSpec] = {}
        for name, kind in self.kinds.items():
            if name in self.numbers:
                specs[name] = tf.TensorSpec([None], tf.float32)
            elif kind.endswith("[]"):
                specs[name] = tf.RaggedTensorSpec([None, None], tf.int64)
            else:
                specs[name] = tf.TensorSpec([None], tf.int64)

        def answer(given: dict[str, Any]) -> dict[str, tf.Tensor]:
            logits = self(given, training=False)[:, 0]
            return {self.config.label: tf.sigmoid(logits), f"{self.config.label}_logit": logits}

        return Signature(answer, specs)

    def get_config(self) -> dict[str, Any]:
        """Raise an error: the run's settings recreate the model."""
        raise NotImplementedError
