"""A layer from a user's contexts, history and exposures to a vector per exposure, in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.layers import HSTU, MLP, FuXi
from gmeta.layers.sequence.hstu import GroupLayerNorm
from gmeta.layers.sequence.reading import Reading, SequenceView, sequence_view
from gmeta.metrics import AUC, UserGAUC
from gmeta.metrics.ranking import TaskMetric
from gmeta.models.sequence.sequence_columns import Layout, SequenceColumns
from gmeta.ops import AttentionMask, Jagged, jagged

_CONTEXTS, _HISTORY, _TARGETS = _PARTS = range(3)  # the groups of tokens
_CONTEXTS_TIME = -(2**60)  # long ago: every time distance to it falls into the last bucket, reserved for it
_BACKBONES: Mapping[str, Any] = {"hstu": HSTU, "fuxi": FuXi}


def make_backbone(
    kind: str,
    *,
    dim: int,
    blocks: int,
    heads: int,
    max_length: int,
    timed: bool,
    mask: AttentionMask,
    horizon: float | None,
    dropout: float,
    seed: int,
) -> tf.keras.layers.Layer:
    """Make a backbone for `ExposureTrunk`: blocks of HSTU or FuXi-α without a bias of places.

    Args:
      kind: ``"hstu"`` or ``"fuxi"``.
      dim: The width of a token; a head has the width ``dim // heads``.
      blocks: The number of blocks.
      heads: The number of heads of a block.
      max_length: About the length of sequences.
      timed: Whether there is a bias of times.
      mask: Which tokens a token sees.
      horizon: As for `gmeta.layers.HSTU`; None for FuXi-α.
      dropout: The share of numbers that are dropped in training.
      seed: The seed of the initial weights and of dropout.

    Raises:
      ConfigError: There is no such backbone.
    """
    if kind not in _BACKBONES:
        raise ConfigError(f"backbone must be 'hstu', 'fuxi' or a layer, got {kind!r}")
    return _BACKBONES[kind](
        blocks=blocks,
        heads=heads,
        attention_dim=dim // heads,
        value_dim=dim // heads,
        max_length=max_length,
        bias_by_place=False,
        bias_by_time=timed,
        mask=mask,
        horizon=horizon,
        dropout=dropout,
        seed=seed,
    )


class ExposureTrunk(tf.keras.layers.Layer):
    r"""Tokens ``[contexts | history | targets]`` and a backbone over them; it returns outputs for targets.

    .. math::
       x_c = W_c e_c + b_c, \quad x_j = W_h [e_j^1; e_j^2; \dots] + b_h, \quad
       x_t = W_t [e_t^1; \dots] + b_t, \quad
       H = \mathrm{GLN}_{scenario}(\mathrm{backbone}(\mathrm{dropout}(\mathrm{GLN}_{part}(X)))_{targets})

    Each contextual feature, each event and each exposure is one token (MTGenRec, section 2; MTGR, Han et al.,
    arXiv 2505.18654, 2025). Group layer norm gives tokens of the three parts the same scale before attention
    compares them, and the scenarios' outputs after it. A target sees the contexts and the history, but no
    other target: all exposures are scored in one pass, each as if it were alone.

    Targets come after the whole history, so positions don't say how long before an exposure an event
    happened; times do. A backbone with a position bias is refused, because a target's score would depend on
    the number of targets before it. Contextual tokens have no time; they have their own bucket of the time
    bias.

    Args:
      backbone: A layer over jagged sequences, such as `gmeta.layers.HSTU` or `gmeta.layers.FuXi`, with
        ``bias_by_place=False``. Its mask says which tokens a token sees; use ``by_time`` if exposures were
        shown while the history went on.
      columns: The columns to read.
      widths: Feature -> width of its vectors.
      dim: d, the width of a token.
      combine: ``"concat"``: as above. ``"sum"``: the vectors of an event or of an exposure are added, without
        W and b; all must be d wide then.
      scenarios: The number of scenarios in the scenario column.
      dropout: The share of a token's numbers that are dropped in training.
      seed: The seed of the initial values and of dropout.

    Raises:
      ConfigError: The backbone has a position bias, or it needs times and none are read; or
        ``combine="sum"`` and widths differ.
    """

    def __init__(
        self,
        backbone: tf.keras.layers.Layer,
        columns: SequenceColumns,
        widths: Mapping[str, int],
        *,
        dim: int,
        combine: Literal["concat", "sum"] = "concat",
        scenarios: int = 1,
        dropout: float = 0.0,
        seed: int = 0,
        name: str = "trunk",
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        self.dim = whole_number(f"{name}: dim", dim, least=1)
        self.backbone, self.columns, self.widths = backbone, columns, dict(widths)
        self.combine, self.seed, self.scenarios = combine, seed, scenarios
        self._check()
        self.drop = tf.keras.layers.Dropout(dropout, seed=seed)
        self.enter = GroupLayerNorm(len(_PARTS), name="enter")
        self.leave = GroupLayerNorm(scenarios, name="leave")
        self.projections: list[MLP] = []
        if combine == "concat":
            inputs = [*([name] for name in columns.contexts), columns.history, columns.targets]
            self.projections = [
                MLP({"out": dim}, seed=len(inputs) * seed + number, name=f"token{number}")
                for number in range(len(inputs))
            ]
            for projection, names in zip(self.projections, inputs, strict=True):
                projection(tf.zeros([0, sum(self.widths[name] for name in names)]))

    def _check(self) -> None:
        if self.combine not in ("concat", "sum"):
            raise ConfigError(f"{self.name}: combine must be 'concat' or 'sum', got {self.combine!r}")
        wide = {name: width for name, width in self.widths.items() if width != self.dim}
        if self.combine == "sum" and wide:
            raise ConfigError(
                f"{self.name}: combine='sum' adds vectors of width dim={self.dim}, but features are "
                f"{wide} wide: make them alike, or choose combine='concat'"
            )
        blocks = getattr(self.backbone, "blocks", [self.backbone])
        if any(getattr(block, "bias_by_place", False) for block in blocks):
            raise ConfigError(
                f"{self.name}: {self.backbone.name} has a bias of places, by which a target's score would "
                "depend on how many targets stand before it: make it with bias_by_place=False, and give "
                "time= for a bias of times"
            )
        if self.backbone.needs_times and self.columns.time is None:
            raise ConfigError(
                f"{self.name}: {self.backbone.name} needs times: name their column by time=, or make it with "
                "bias_by_time=False and a mask that isn't by_time"
            )

    def call(
        self, vectors: Mapping[str, tf.Tensor], layout: Layout, training: bool | None = None
    ) -> tf.Tensor:
        """Compute a vector for each exposure.

        Args:
          vectors: Feature -> (ids, width), the vectors of the ids that `SequenceColumns.ids` returned.
          layout: The layout of the same batch.
          training: Whether to apply dropout.

        Returns:
          (exposures, dim).
        """
        layout = Layout(*layout)
        entered, view, ends = self._enter(vectors, layout, training)
        out = self.backbone(entered, view=view, training=training)
        return self._leave(jagged.split(out, ends)[1].values, layout)

    def read(self, vectors: Mapping[str, tf.Tensor], layout: Layout) -> tuple[Reading, tf.Tensor]:
        """Read contexts and histories, and keep what later events and exposures need of them.

        Args:
          vectors: As for a call.
          layout: The layout of a batch without exposures.

        Returns:
          What the backbone keeps, and the last token of each sequence as it enters there, (users, dim).
        """
        entered, view, _ = self._enter(vectors, layout, training=False)
        count = len(self.columns.contexts)
        return self.backbone.read(entered, view=view, contexts=count)[1], jagged.last(entered)

    def extend(
        self, reading: Reading, last: tf.Tensor, vectors: Mapping[str, tf.Tensor], layout: Layout
    ) -> tuple[tf.Tensor, Reading, tf.Tensor]:
        """Read events that come after histories that were read.

        Block by block, an event's token depends on the time of the event after it. So the last event that was
        read is read again.

        Args:
          reading: What `read` kept.
          last: The last tokens, (users, dim).
          vectors: Feature -> (events, width), of the new events.
          layout: The offsets and times of the new events; its targets aren't read.

        Returns:
          How many tokens stay as they were, (users,); what to keep of the tokens after those; and the last
          tokens.
        """
        again = tf.cast(reading.lengths > reading.contexts, tf.int64)  # 1 where there is an event
        rereads = tf.where(again > 0)[:, 0]
        offsets = tf.concat([[0], tf.cumsum(again)], axis=0)
        given = [vectors[name] for name in self.columns.history]
        events = self.enter(self._token(len(self.columns.contexts), given), _HISTORY)
        former = Jagged(tf.gather(tf.cast(last, events.dtype), rereads), offsets)
        stretch = jagged.concat(former, Jagged(events, layout.history))
        times = None
        if reading.times is not None:
            places = tf.maximum(reading.lengths - 1, 0)
            before = tf.gather(tf.gather(reading.times, places, batch_dims=1), rereads)
            times = jagged.concat(
                Jagged(before, offsets), Jagged(layout.history_times, layout.history)
            ).values
        kept = reading._replace(lengths=reading.lengths - again)
        _, added = self.backbone.append(stretch, kept, times)
        latest = tf.where(
            (added.lengths > 0)[:, tf.newaxis], jagged.last(stretch), tf.cast(last, events.dtype)
        )
        return kept.lengths, added, latest

    def score(
        self, reading: Reading, vectors: Mapping[str, tf.Tensor], layout: Layout, *, at_once: int
    ) -> tf.Tensor:
        """Compute a vector for each exposure from what was kept of its user.

        Args:
          reading: What `read` kept.
          vectors: Feature -> (exposures, width).
          layout: The offsets, times and scenarios of the exposures; its history isn't read.
          at_once: How many exposures of a user are compared with the history at once, which bounds memory.

        Returns:
          (exposures, dim).
        """
        given = [vectors[name] for name in self.columns.targets]
        entered = self.enter(self._token(len(self.columns.contexts) + 1, given), _TARGETS)
        exposures = Jagged(entered, layout.targets)
        values = jagged.to_padded(exposures)
        users, width = tf.unstack(tf.shape(values)[:2])
        size = tf.clip_by_value(width, 1, at_once)
        pieces = tf.maximum(-(-width // size), 1)
        parts = [values]
        if reading.times is not None:
            parts.append(jagged.to_padded(Jagged(layout.target_times, layout.targets)))
        cut = []
        for part in parts:
            inner = list(part.shape[2:])
            wide = tf.pad(part, [[0, 0], [0, pieces * size - width], *[[0, 0]] * len(inner)])
            shaped = tf.reshape(wide, [users, pieces, size, *inner])
            cut.append(tf.transpose(shaped, [1, 0, 2, *range(3, 3 + len(inner))]))

        def attend(piece: list[tf.Tensor]) -> tf.Tensor:
            return self.backbone.read_on(piece[0], reading, times=piece[1] if len(piece) > 1 else None)[0]

        spec = tf.TensorSpec([None, None, self.dim], values.dtype)
        found = tf.map_fn(attend, cut, fn_output_signature=spec, parallel_iterations=1)
        found = tf.reshape(tf.transpose(found, [1, 0, 2, 3]), [users, pieces * size, self.dim])
        targets = jagged.from_padded(found, jagged.lengths(exposures)).values
        return self._leave(targets, layout)

    def _leave(self, targets: tf.Tensor, layout: Layout) -> tf.Tensor:
        return self.leave(targets, 0 if layout.scenarios is None else layout.scenarios)

    def _enter(
        self, vectors: Mapping[str, tf.Tensor], layout: Layout, training: bool | None
    ) -> tuple[Jagged, SequenceView, tf.Tensor]:
        """Return the tokens of whole sequences, their view, and where each sequence's targets begin."""
        tokens, contexts = self._tokens(self.columns.parts(vectors, layout), layout)
        with tf.device("CPU:0"):  # as all offsets (`gmeta.ops.jagged`)
            ends = layout.history[1:] - layout.history[:-1] + contexts
        entered = Jagged(self.drop(tokens.values, training=training), tokens.offsets)
        return entered, self._view(tokens.offsets, contexts, layout), ends

    def _token(self, number: int, given: Sequence[tf.Tensor]) -> tf.Tensor:
        """Make tokens of one input's vectors: of a context, of the history or of the targets."""
        if self.combine == "sum":
            return tf.add_n([tf.cast(each, self.compute_dtype) for each in given])
        return self.projections[number](tf.concat(list(given), axis=1))

    def _tokens(self, parts: Mapping[str, list[tf.Tensor]], layout: Layout) -> tuple[Jagged, tf.Tensor]:
        """Return all tokens with their norm, and the number of contextual tokens in each sequence."""
        count = len(self.columns.contexts)
        with tf.device("CPU:0"):
            users = tf.size(layout.history, tf.int64) - 1
            offsets, counts = count * tf.range(users + 1), tf.fill([users], tf.constant(count, tf.int64))
        inputs = [*([vector] for vector in parts["contexts"]), parts["history"], parts["targets"]]
        kinds = [_CONTEXTS] * count + [_HISTORY, _TARGETS]
        *contexts, history, targets = (
            self.enter(self._token(*each), kind) for kind, each in zip(kinds, enumerate(inputs), strict=True)
        )
        tokens = [Jagged(history, layout.history), Jagged(targets, layout.targets)]
        if count:
            tokens.insert(0, Jagged(tf.reshape(tf.stack(contexts, axis=1), [-1, self.dim]), offsets))
        return jagged.concat(*tokens), counts

    def _view(self, offsets: tf.Tensor, contexts: tf.Tensor, layout: Layout) -> SequenceView:
        with tf.device("CPU:0"):
            targets = layout.targets[1:] - layout.targets[:-1]
        if layout.history_times is None or layout.target_times is None:
            return sequence_view(self.backbone.mask, offsets, contexts, targets)
        times = (layout.history_times, layout.target_times)
        parts = [Jagged(times[0], layout.history), Jagged(times[1], layout.targets)]
        count = len(self.columns.contexts)
        if count:
            with tf.device("CPU:0"):
                # The mask must get a time for these tokens, but ignores it; any time of the batch will do.
                some = tf.concat([*(each[:1] for each in times), [tf.int64.max]], axis=0)[0]
                users = tf.size(contexts, tf.int64)
                size, begins = count * users, count * tf.range(users + 1)
            parts.insert(0, Jagged(tf.fill([size], some), begins))
        known = jagged.concat(*parts)
        view = sequence_view(self.backbone.mask, offsets, contexts, targets, known.values)
        own = view.column_times
        # With exposures between events, the next event may come after an exposure that sees this one.
        times = (own if self.backbone.mask.by_time else view.row_times, own)
        if count:
            is_context = jagged.positions(known) < count
            times = tuple(tf.where(is_context, tf.constant(_CONTEXTS_TIME, tf.int64), x) for x in times)
        return view._replace(row_times=times[0], column_times=times[1])


# Keras metrics of a model with several labels, measured for each label separately.

_BINARY = {
    "accuracy": tf.keras.metrics.BinaryAccuracy,
    "acc": tf.keras.metrics.BinaryAccuracy,
    "crossentropy": tf.keras.metrics.BinaryCrossentropy,
    "ce": tf.keras.metrics.BinaryCrossentropy,
}


class LabelMetrics:
    """The ``metrics`` passed to `compile`, for each of a model's labels.

    They see each exposure's label and its predicted probability, both (exposures, 1).

    Args:
      model: The model's name.
      labels: The names of its labels.
      given: One or several metrics, which measure every label; or label -> one or several metrics. A metric
        is a Keras metric, its name, or a function of labels and probabilities.
      taken: Names that other results already use.

    Raises:
      ConfigError: A label is unknown, or a metric can't be measured here.
    """

    def __init__(self, model: str, labels: Sequence[str], given: Any, taken: Sequence[str]) -> None:
        by_label = given if isinstance(given, Mapping) else dict.fromkeys(labels, given)
        strange = [label for label in by_label if label not in labels]
        if strange:
            raise ConfigError(
                f"{model}: metrics name {', '.join(map(repr, strange))}, but the labels are "
                f"{', '.join(labels)}"
            )
        self.by_label = {
            label: [_of_label(model, metric, label) for metric in _list(of_label)]
            for label, of_label in by_label.items()
        }
        names = [*taken, *(metric.name for metric in self.metrics)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                f"{model}: {', '.join(twice)} would be measured twice: give such a metric another name="
            )

    @property
    def metrics(self) -> list[tf.keras.metrics.Metric]:
        """The metrics of all labels."""
        return [metric for of_label in self.by_label.values() for metric in of_label]

    def update(self, labels: Mapping[str, tf.Tensor], logits: Mapping[str, tf.Tensor]) -> None:
        """Update the metrics with exposures.

        Args:
          labels: Name -> (exposures,).
          logits: Name -> (exposures,), logits of the label's probability.
        """
        for label, metrics in self.by_label.items():
            for metric in metrics:
                metric.update_state(labels[label][:, tf.newaxis], tf.sigmoid(logits[label])[:, tf.newaxis])


def _list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _of_label(model: str, given: Any, label: str) -> tf.keras.metrics.Metric:
    """Make a separate metric for the label, with the label in its name."""
    if isinstance(given, AUC | UserGAUC | TaskMetric):
        raise ConfigError(
            f"{model}: {type(given).__name__} isn't a metric for compile: auc_{label} and gauc_{label} are "
            "always measured in evaluate"
        )
    if isinstance(given, str) and given in _BINARY:
        found = _BINARY[given](name=given)
    else:
        found = tf.keras.metrics.get(given)
    if not isinstance(found, tf.keras.metrics.Metric):
        name = given if isinstance(given, str) else getattr(found, "__name__", type(found).__name__)
        found = tf.keras.metrics.MeanMetricWrapper(found, name=name)
    return type(found).from_config({**found.get_config(), "name": f"{found.name}_{label}"})
