"""Training on a stream that begins with a model of a run for ranking.

::

  RUN/start/start.json    what the model reads, and its settings
  RUN/start/ids.npz       the numbers of the ids that it knows
  RUN/start/best/         its weights, rows and the state of its optimizer

A run on a stream copies these once, and no longer needs the run that it began with. Before the first event,
its model computes the logits of that run, to the last bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import stage_folder
from gmeta.core.json_values import parse_json
from gmeta.core.settings import from_mapping, parse_duration, to_mapping
from gmeta.experiment.online.online_model import OnlineConfig
from gmeta.experiment.plan.next_item_config import BLEND
from gmeta.experiment.plan.ranking_config import GRM, RankingConfig, RankingMethod
from gmeta.experiment.ranking.examples import Encoding, Parts, Scale
from gmeta.experiment.ranking.networks import IDS, NEW, NUMBERS, RankingModel
from gmeta.experiment.ranking.runs import Blend
from gmeta.experiment.ranking.served import number_ids, scale_numbers
from gmeta.experiment.runs.best_epoch import BEST, load_weights, read_chosen
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.export.signature import Signature
from gmeta.initializers import Zeros
from gmeta.io.streams.event_stream import Stream
from gmeta.io.streams.late_labels import LOG_ODDS
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.ops import hash_text
from gmeta.optimizers import Adam, RowPrior
from gmeta.policies import TTL
from gmeta.preprocess.table_spec import ColumnSpec, TableSpec

FOLDER = "start"
OF_THE_RUN = ("features", "dim", "hidden", "cross", "rows_rate", "seed")
"""Settings that the run for ranking decides."""

_ADVICE = "train another one in Python, on gmeta.io.stream (docs/streams.md)"
_SEED = "seed-"


@dataclass(frozen=True)
class Column:
    """A column of events, and how `gmeta prepare` stored it.

    Attributes:
      name: The feature, or the column of numbers.
      source: The column of events.
      text: Whether it holds texts, which are hashed.
      number: Whether it holds numbers, not ids.
      many: Whether it holds lists.
      default: What is stored for a gap; None: NaN, or the hash of the empty text.
    """

    name: str
    source: str
    text: bool
    number: bool
    many: bool
    default: float | int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types that events may have in this column."""
        if self.number:
            return "float32", "float64", "int64"
        kind = "string" if self.text else "int64"
        return (f"{kind}[]",) if self.many else (kind,) if self.text else (kind, "timestamp")


@dataclass(frozen=True)
class Start:
    """A trained model of a run for ranking.

    Attributes:
      path: The folder of the training run.
      config: The run's settings.
      method: The method.
      seed: Its seed.
      samples: The number of rows that it was trained on.
      columns: The columns that it reads.
      label: The column of events that has its label, 0 and 1; None: no column has.
      encoding: Its ids and scales.
      calibration: What its scores are calibrated by.
    """

    path: str
    config: RankingConfig
    method: str
    seed: int
    samples: int
    columns: tuple[Column, ...]
    label: str | None
    encoding: Encoding
    calibration: Blend

    @classmethod
    def find(cls, path: Path) -> Start:
        """Read a run for ranking, a method of it, or a training run of it.

        Args:
          path: ``RUN``, whose best method in validation is taken, ``RUN/method`` or ``RUN/method/seed-0``.

        Raises:
          ConfigError: The model can't be trained on a stream.
          DataError: There is no such run, or it isn't fully trained.
        """
        run, method, seed = _parse(path)
        if run.family != "ranking" and run.beside.begun:
            raise ConfigError(f"--from {path}: this run is for {run.family}: name {run.beside.path}")
        if run.family != "ranking":
            raise ConfigError(
                f"--from {path}: this run is for {run.family}, and --follow continues runs for ranking "
                f"(gmeta train --for ranking); {_ADVICE}"
            )
        config, data = run.load(unchanged=True)
        with read_chosen(run) as chosen:
            validation = {str(name): float(value) for name, value in chosen["validation"].items()}
            calibrations = {name: Blend.from_json(each) for name, each in chosen["calibrations"].items()}
        settings = _method(config, method or _best(config, validation), path)
        method = next(name for name, each in config.methods.items() if each is settings)
        seed = config.seeds[0] if seed is None else seed
        if seed not in config.seeds:
            raise ConfigError(f"--from {path}: the seeds are {', '.join(map(str, config.seeds))}")
        calibration = calibrations[f"{method}, seed {seed}"]
        if not config.binary:
            raise ConfigError(
                f"--from {path}: {config.label} is a number, and --follow learns 0 and 1; {_ADVICE}"
            )
        if not calibration.weights[0] > 0:
            raise ConfigError(
                f"--from {path}: {settings.label} learned nothing: its scores don't order the rows of "
                "validation; name another method"
            )
        manifest, parts = Manifest.load(data), Parts.read(config, data)
        encoding = replace(parts.encoding, ids={name: parts.encoding.ids[name] for name in config.features})
        columns, label = _columns(manifest, config, encoding, path)
        folder = str(run.training(method, seed))
        return cls(folder, config, method, seed, len(parts.train), columns, label, encoding, calibration)

    def save(self, folder: Path) -> None:
        """Write it, with weights and rows, to ``folder/start``."""
        with stage_folder(folder / FOLDER) as staging:
            encoding = self.encoding
            np.savez(staging / "ids.npz", **{f"{n}": ids for n, ids in enumerate(encoding.ids.values())})
            numbers = {
                name: {"mean": each.mean, "deviation": each.deviation, "log": bool(each.log)}
                for name, each in encoding.scales.items()
            }
            about = {name: getattr(self, name) for name in ("path", "method", "seed", "samples", "label")}
            about |= {"config": to_mapping(self.config), "calibration": self.calibration.to_json()}
            about |= {"columns": [to_mapping(each) for each in self.columns], "scales": numbers}
            about |= {"features": [*encoding.ids], "mean": encoding.mean, "lists": [*encoding.lists]}
            (staging / "start.json").write_text(json.dumps(about, indent=1))
            shutil.copytree(Path(self.path) / BEST, staging / BEST)

    @classmethod
    def load(cls, folder: Path) -> Start:
        """Read what `save` wrote.

        Raises:
          DataError: It isn't there, or is damaged.
        """
        held = folder / FOLDER
        try:
            about = parse_json((held / "start.json").read_text())
            with np.load(held / "ids.npz") as found:
                ids = {name: found[f"{number}"] for number, name in enumerate(about["features"])}
            config = from_mapping(RankingConfig, about["config"], str(held))
            scales = {name: from_mapping(Scale, each, str(held)) for name, each in about["scales"].items()}
            encoding = Encoding(config, ids, tuple(about["lists"]), scales, about["mean"], 1.0)
            columns = tuple(from_mapping(Column, each, str(held)) for each in about["columns"])
            own = {name: about[name] for name in ("path", "method", "seed", "samples", "label")}
            calibration = Blend.from_json(about["calibration"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the model that this run began with can't be read: {error}",
                path=held,
                advice="restore the folder, or begin another --run with --from",
            ) from error
        return cls(**own, config=config, columns=columns, encoding=encoding, calibration=calibration)

    @property
    def settings(self) -> RankingMethod:
        """The method's settings, without what is random in training.

        A stream trains each event once, so that dropout has no use, and a run that was killed and continues
        has the bits of one that wasn't.
        """
        return replace(self.config.methods[self.method], dropout=0.0, unknown=0.0)

    def complete(self, given: OnlineConfig, stream: Stream) -> OnlineConfig:
        """Return the settings of training on a stream with what the run and the stream decide.

        Raises:
          ConfigError: A column that the model reads is missing, or of another type; or a setting is the
            run's.
        """
        usual = {each.name: each.default for each in fields(OnlineConfig)}
        refuse_settings(name for name in OF_THE_RUN if getattr(given, name) != usual[name])
        columns, names = dict(stream.sources[0].columns), stream.schema.names
        label = given.label or self.label
        if label is None or label not in names:
            raise ConfigError(
                f"label = {label or self.config.label!r} is no column of 0 and 1 of {given.source}, "
                f"which has {', '.join(names)}: name one, --set 'label=\"COLUMN\"'"
            )
        if missing := [each.source for each in self.columns if each.source not in columns]:
            raise ConfigError(
                f"{given.source} lacks {', '.join(missing)}, which {self.path} was trained on; it has "
                f"{', '.join(columns)}: add what is missing to the events, or train a run without it, "
                "gmeta train --for ranking --set 'features=[...]'"
            )
        ids = {each.source for each in self.columns if not each.number}
        for each in self.columns:
            if columns[each.source] not in each.kinds:
                raise ConfigError(
                    f"{given.source}: {each.source!r} is {columns[each.source]}, and {self.path} was trained "
                    f"on {each.kinds[0]}: write the column as in the prepared data, or give its type, "
                    f"--set 'columns={{{each.source}=\"{each.kinds[0]}\", ...}}'"
                )
            if each.source not in {*ids, given.time} and given.columns is None:
                columns[each.source] = "float32"  # the first numbers may be whole
        sources = {each.name: each.source for each in self.columns}
        users = given.users or sources.get(self.config.user or "")
        if users is not None and users not in sources.values():
            raise ConfigError(f"users = {users!r}: the model reads {', '.join(sources.values())}")
        method = self.settings
        return replace(
            given,
            start=self.path,
            label=label,
            columns=columns,
            features=tuple(dict.fromkeys(sources.values())),
            users=users,
            learning_rate=given.rate(method.learning_rate),
            dim=method.dim,
            hidden=method.hidden,
            cross=method.cross,
        )

    def build(self, config: OnlineConfig, folder: Path) -> ContinuedModel:
        """Build and compile the model, with the weights and rows of the run.

        Args:
          config: Completed settings.
          folder: The folder to which `save` wrote.
        """
        ranked = RankingModel(self.settings, self.encoding, self.samples, self.seed)
        rate = config.rate()
        loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        ranked.compile(tf.keras.optimizers.Adam(rate), loss)
        model = ContinuedModel(config, self, ranked)
        model.create_weights()
        ranked.optimizer.build(ranked.trainable_variables)
        load_weights(ranked, folder / FOLDER)
        ranked.optimizer.learning_rate.assign(rate)  # the moments are the run's, and the rate this one's
        model.compile(ranked.optimizer, loss, weighted_metrics=[])
        return model


def refuse_settings(names: Iterable[str]) -> None:
    """Refuse settings that are the run's.

    Raises:
      ConfigError: There is one.
    """
    if names := [*names]:
        raise ConfigError(f"{', '.join(names)}: --from takes the run's; leave the setting out, or --from")


def _parse(given: Path) -> tuple[RunFolder, str | None, int | None]:
    path = given.absolute()
    places: list[tuple[Path, str | None, str | None]] = [
        (path, None, None),
        (path.parent, path.name, None),
        (path.parent.parent, path.parent.name, path.name),
    ]
    for run, method, seed in places:
        if RunFolder(run).begun:
            if seed is not None and not (seed.startswith(_SEED) and seed[len(_SEED) :].isdigit()):
                raise ConfigError(f"--from {path}: {seed!r} is no training run such as {_SEED}0")
            return RunFolder(run), method, None if seed is None else int(seed[len(_SEED) :])
    raise DataError(
        "no run of `gmeta train` is here", path=path, advice="name a run for ranking, as in --from RUN/dcn"
    )


def _method(config: RankingConfig, name: str, path: Path) -> RankingMethod:
    own = [each for each, method in config.methods.items() if method.model != GRM]
    if name not in own:
        why = "reads histories, which a stream doesn't have" if name in config.methods else "is none of them"
        why = "holds baselines, which don't learn from a stream" if name == BLEND else why
        raise ConfigError(
            f"--from {path}: --follow continues {', '.join(own) or 'no method of this run'}; {name!r} {why}; "
            f"{_ADVICE}"
        )
    return config.methods[name]


def _best(config: RankingConfig, validation: Mapping[str, float]) -> str:
    own = [name for name, method in config.methods.items() if method.model != GRM]
    return min(own, key=validation.__getitem__) if own else next(iter(config.methods), BLEND)


def _columns(
    manifest: Manifest, config: RankingConfig, encoding: Encoding, path: Path
) -> tuple[tuple[Column, ...], str | None]:
    """Return the columns that a model reads, and the label's if it is 0 and 1 there."""
    table = manifest.config.get("table")
    if not table:
        raise ConfigError(
            f"--from {path}: its data weren't prepared from a table, so nothing describes events: prepare "
            "them with gmeta prepare --data"
        )
    specs = from_mapping(TableSpec, table, "the run's data").columns
    found = []
    for name, number in [
        *((name, False) for name in config.features),
        *((name, True) for name in config.numbers),
    ]:
        spec = specs[name]
        rules = ("values", "positive", "format", "min", "max")
        if rule := next((each for each in rules if getattr(spec, each) is not None), None):
            raise ConfigError(
                f"--from {path}: {name!r} was prepared with {rule} = {getattr(spec, rule)!r}, which events "
                f"don't pass: prepare the column as it is, and train again; {_ADVICE}"
            )
        found.append(
            Column(name, spec.source or name, spec.hash, number, name in encoding.lists, _default(spec))
        )
    of_label = specs.get(config.label)
    plain = of_label is not None and of_label.positive is None and of_label.values is None
    return tuple(found), (of_label.source or config.label) if of_label is not None and plain else None


def _default(spec: ColumnSpec) -> float | int | None:
    if isinstance(spec.default, str):
        return int(hash_text(tf.constant(spec.default)).numpy())
    return int(spec.default) if spec.default is not None and spec.dtype != "float32" else spec.default


class ContinuedModel(Model):
    r"""A model of a run for ranking on the raw columns of events, with its calibration.

    .. math:: \hat y = \sigma(a + b\,f(x)), \quad
       f(x) = b_0 + \sum_f (w_{x_f} + u_{x_f}) + g(v_{x_1} + u'_{x_1}, \dots, z)

    f is the run's model, and a and b its calibration, which don't change. An id that the run didn't see has
    no row there: it gets one of zeros, u, in a table of its feature, which learns from the id's first event
    on. In a list, new ids are pooled apart from the others.

    Args:
      config: Completed settings.
      start: Where the model comes from.
      ranked: The run's model.

    Shapes:
      {column: (samples,), or ragged (samples, None)} -> (samples, 1) logits.
    """

    def __init__(self, config: OnlineConfig, start: Start, ranked: RankingModel) -> None:
        super().__init__(name="online")
        columns, method = config.columns or {}, start.settings
        self.config, self.ranked, self.columns = config, ranked, start.columns
        self.kinds = {each.source: columns[each.source] for each in start.columns}
        prior = RowPrior((method.bias_variance, *[method.variance] * method.dim), start.samples)
        eviction = None if config.ttl is None else TTL(seconds=parse_duration(config.ttl, "ttl"))

        def feature(name: str) -> FeatureConfig:
            table = TableConfig(
                f"new/{name}",
                1 + method.dim,
                initializer=Zeros(),
                optimizer=Adam(None, prior=prior),
                eviction=eviction,
            )
            return FeatureConfig(f"new/{name}", table, "sqrtn", hash=True)

        self.new = EmbeddingCollection(
            [feature(name) for name in ranked.layout.names], seed=start.seed, name="new"
        )
        # Not attributes, which would be weights: they don't change, and RUN/start has them.
        known = {name: tf.Variable(ids, trainable=False) for name, ids in start.encoding.ids.items()}
        self._number: Callable[[str, tf.Tensor], tf.Tensor] = lambda name, ids: number_ids(ids, known[name])
        self._scales = start.encoding.scales
        ((_, weight, mean, deviation),) = start.calibration.terms()
        # The constants of an export, which rounds them the same way.
        self._calibration = start.calibration.intercept, weight / deviation, mean

    def call(self, inputs: Mapping[str, Any], training: bool | None = None) -> tf.Tensor:
        """Compute the logits of samples, (samples, 1)."""
        layout = self.ranked.layout
        keys, asked, new = {}, dict[str, Any](), dict[str, tf.RaggedTensor]()
        numbers = []
        for each in self.columns:
            value = inputs[each.source]
            if each.number:
                value = tf.cast(value, tf.float32)
                if each.default is not None:
                    value = tf.where(tf.math.is_finite(value), value, np.float32(each.default))
                numbers.append(scale_numbers(self._scales[each.name], value))
                continue
            flat = value.flat_values if each.many else value
            if each.text and each.default is not None:
                flat = tf.where(flat == hash_text(tf.constant("")), tf.constant(each.default, tf.int64), flat)
            number = self._number(each.name, flat)
            if each.many:
                value, number = value.with_flat_values(flat), value.with_flat_values(number)
                start = layout.lists[each.name]
                asked[each.name] = tf.ragged.boolean_mask(
                    number.with_flat_values(number.flat_values + start), number > 0
                )
                new[f"new/{each.name}"] = tf.ragged.boolean_mask(value, tf.equal(number, 0))
            else:
                keys[each.name] = number + layout.single[each.name]
                unknown = tf.equal(number, 0)
                new[f"new/{each.name}"] = tf.RaggedTensor.from_row_lengths(
                    tf.boolean_mask(flat, unknown), tf.cast(unknown, tf.int64), validate=False
                )
        first = inputs[self.columns[0].source]
        rows = first.nrows() if self.columns[0].many else tf.shape(first)[0]
        ids = [keys[name] for name in layout.single]
        asked[IDS] = tf.stack(ids, axis=1) if ids else tf.zeros([rows, 0], tf.int64)
        asked[NUMBERS] = tf.stack(numbers, axis=1) if numbers else tf.zeros([rows, 0])
        found = self.new(new)
        asked[NEW] = tf.stack([found[f"new/{name}"] for name in layout.names], axis=1)
        intercept, factor, mean = map(np.float32, self._calibration)
        logits = intercept + factor * (self.ranked(asked, training=training) - mean)
        if training and LOG_ODDS in inputs:
            logits += inputs[LOG_ODDS][:, tf.newaxis]
        return logits

    def create_weights(self) -> None:
        """Create the dense weights, by a call on two rows."""
        row: dict[str, Any] = {}
        for each in self.columns:
            value = tf.zeros([2], tf.float32 if each.number else tf.int64)
            row[each.source] = tf.RaggedTensor.from_row_lengths(value, [1, 1]) if each.many else value
        self(row, training=False)

    def signature(self) -> Signature:
        """Return the exported model's request: the columns, to the probability and the logit of the label."""
        specs: dict[str, tf.TypeSpec] = {}
        for each in self.columns:
            dtype = tf.float32 if each.number else tf.string if each.text else tf.int64
            specs[each.source] = (
                tf.RaggedTensorSpec([None, None], dtype) if each.many else tf.TensorSpec([None], dtype)
            )
        texts = [each.source for each in self.columns if each.text]

        def answer(given: dict[str, Any]) -> dict[str, tf.Tensor]:
            hashed = {name: tf.ragged.map_flat_values(hash_text, given[name]) for name in texts}
            logits = self({**given, **hashed}, training=False)[:, 0]
            return {self.config.label: tf.sigmoid(logits), f"{self.config.label}_logit": logits}

        return Signature(answer, specs)

    def get_config(self) -> dict[str, Any]:
        """Raise an error: the run's settings recreate the model."""
        raise NotImplementedError
