"""The JSON form of an evaluation: the table as data, for gmeta and for other tools, such as jq.

::

  {"format": "gmeta-evaluation", "version": 3, "title": ..., "data": {...}, "seeds": [0, 1, 2],
   "methods": [{"name": "maml", "label": "MAML", "description": ...,
                "results": [{"steps": 1, "metrics": {"mae": {"mean": 0.917, "spread": 0.009,
                                                              "per_seed": [0.91, 0.92, 0.92]}, ...}}, ...]}],
   "bootstrap": {"resamples": 2000, "level": 0.95,
                 "comparisons": [{"method": "maml", "steps": 1, "baseline": "biases", "metric": "mae",
                                  "difference": -0.009, "low": -0.014, "high": -0.004}, ...]},
   "splits": [{"name": "item_cold", "tasks": 2863, "methods": [{"name": "maml", "results": [...]}],
               "bootstrap": {...}}],
   "support_curve": {"steps": 1, "methods": [{"name": "maml", "points": [{"ratings": 4, "mae": {...}}]}]},
   "calibration": [{"name": "ridge", "ratio": {...}, "coverage": [{"level": 80, "share": {...}}],
                    "deviations": [0.81, ...], "errors": [0.83, ...]}],
   "training": [{"name": "maml", "runs": [{"epoch": [1, 2], "curves": {"loss": [...], "mae": [...]}}]}],
   "config": {...}, "notes": [...], "seconds": {"train": 61.5}}

``mean`` and ``spread`` (sample standard deviation) are for other readers; gmeta recomputes them from
``per_seed``. A non-finite number is ``null``, and is read back as nan. Ordered values are lists, because not
every reader keeps the order of an object's keys. Documents of version 2, which have neither ``bootstrap`` nor
``calibration``, are read as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NewType

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import write_atomically
from gmeta.core.json_values import parse_json
from gmeta.core.settings import copy_converter, from_mapping, to_mapping
from gmeta.experiment.results.evaluation import (
    Calibration,
    DataDescription,
    Evaluation,
    MethodResult,
    SplitResult,
    Spread,
    TrainingRun,
)
from gmeta.experiment.results.metrics import Bootstrap

FORMAT, VERSION, FORMER = "gmeta-evaluation", 3, 2

Number = NewType("Number", float)
"""A float that is ``null`` in JSON where it isn't finite."""

_converter = copy_converter()
_converter.register_structure_hook(
    Number, lambda value, _: math.nan if value is None else _converter.structure(value, float)
)
_converter.register_unstructure_hook(Number, lambda value: float(value) if math.isfinite(value) else None)


@dataclass
class _Values:
    mean: Number
    spread: Number
    per_seed: list[Number]


@dataclass
class _Result:
    steps: int
    metrics: dict[str, _Values]


@dataclass
class _Method:
    name: str
    label: str
    description: str
    results: list[_Result]


@dataclass
class _MethodOnSplit:
    name: str
    results: list[_Result]


@dataclass
class _Split:
    name: str
    tasks: int
    methods: list[_MethodOnSplit]
    bootstrap: Bootstrap | None = None


@dataclass
class _Point:
    ratings: int
    mae: _Values


@dataclass
class _Curve:
    name: str
    points: list[_Point]


@dataclass
class _SupportCurve:
    steps: int | None
    methods: list[_Curve]


@dataclass
class _Coverage:
    level: int
    share: _Values


@dataclass
class _Calibration:
    name: str
    ratio: _Values
    coverage: list[_Coverage]
    deviations: list[Number]
    errors: list[Number]


@dataclass
class _Run:
    epoch: list[int]
    curves: dict[str, list[Number]]


@dataclass
class _Training:
    name: str
    runs: list[_Run]


@dataclass
class _Document:
    format: str
    version: int
    title: str
    data: DataDescription
    seeds: list[int]
    methods: list[_Method]
    splits: list[_Split]
    support_curve: _SupportCurve
    training: list[_Training]
    config: dict[str, Any]
    notes: list[str]
    seconds: dict[str, Number]
    bootstrap: Bootstrap | None = None
    calibration: list[_Calibration] = field(default_factory=list)


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Encode an evaluation as JSON values."""
    e = evaluation
    document = _Document(
        format=FORMAT,
        version=VERSION,
        title=e.title,
        data=e.data,
        seeds=[int(seed) for seed in e.seeds],
        methods=[_Method(name, m.label, m.description, _results(m.results)) for name, m in e.methods.items()],
        splits=[
            _Split(
                name,
                s.tasks,
                [_MethodOnSplit(method, _results(found)) for method, found in s.results.items()],
                s.bootstrap,
            )
            for name, s in e.splits.items()
        ],
        support_curve=_SupportCurve(
            e.support_steps,
            [
                _Curve(name, [_Point(int(size), _values(mae)) for size, mae in sizes.items()])
                for name, sizes in e.support_curve.items()
            ],
        ),
        training=[
            _Training(name, [_Run([*map(int, run.epoch)], run.curves) for run in runs])  # type: ignore[arg-type]
            for name, runs in e.training.items()
        ],
        config=dict(e.config),
        notes=list(e.notes),
        seconds=dict(e.seconds),  # type: ignore[arg-type]
        bootstrap=e.bootstrap,
        calibration=[
            _Calibration(
                name,
                _values(c.ratio),
                [_Coverage(int(level), _values(shares)) for level, shares in c.coverage.items()],
                [*map(Number, c.deviations)],
                [*map(Number, c.errors)],
            )
            for name, c in e.calibration.items()
        ],
    )
    return to_mapping(document, _converter)


def _results(results: Mapping[int, Mapping[str, Sequence[float]]]) -> list[_Result]:
    return [
        _Result(int(steps), {metric: _values(values) for metric, values in metrics.items()})
        for steps, metrics in results.items()
    ]


def _values(values: Sequence[float]) -> _Values:
    spread = Spread.of([float(value) for value in values])
    deviation = math.nan if spread.deviation is None else spread.deviation
    return _Values(Number(spread.mean), Number(deviation), [Number(value) for value in values])


def from_json(value: object) -> Evaluation:
    """Decode the JSON values of `to_json`.

    Raises:
      DataError: The format or version is unknown, a part is missing or of the wrong kind, or two parts
        contradict each other. The message names the part by its path in the document.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f"not a {FORMAT} document")
    if value.get("version") not in (FORMER, VERSION):
        raise DataError(f"version {value.get('version')!r}, this gmeta reads versions {FORMER} and {VERSION}")
    try:
        return _evaluation(from_mapping(_Document, value, "document", _converter))
    except ConfigError as error:
        raise DataError(str(error)) from error


def _evaluation(document: _Document) -> Evaluation:
    d = document
    return Evaluation(
        title=d.title,
        data=d.data,
        seeds=tuple(d.seeds),
        methods={m.name: MethodResult(m.label, m.description, _by_steps(m.results)) for m in d.methods},
        splits={
            s.name: SplitResult(s.tasks, {m.name: _by_steps(m.results) for m in s.methods}, s.bootstrap)
            for s in d.splits
        },
        config=d.config,
        support_curve={
            curve.name: {point.ratings: tuple(point.mae.per_seed) for point in curve.points}
            for curve in d.support_curve.methods
        },
        support_steps=d.support_curve.steps,
        training={
            t.name: tuple(TrainingRun(tuple(run.epoch), run.curves) for run in t.runs) for t in d.training
        },
        notes=tuple(d.notes),
        seconds=d.seconds,
        bootstrap=d.bootstrap,
        calibration={
            c.name: Calibration(
                tuple(c.ratio.per_seed),
                {each.level: tuple(each.share.per_seed) for each in c.coverage},
                tuple(c.deviations),
                tuple(c.errors),
            )
            for c in d.calibration
        },
    )


def _by_steps(results: Sequence[_Result]) -> dict[int, dict[str, tuple[float, ...]]]:
    return {
        result.steps: {metric: tuple(values.per_seed) for metric, values in result.metrics.items()}
        for result in results
    }


def save(evaluation: Evaluation, path: Path) -> Path:
    """Write an evaluation as a JSON file, whole or not at all.

    Raises:
      ConfigError: ``config`` holds a value that JSON can't represent.
    """
    try:
        text = json.dumps(to_json(evaluation), indent=1, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the evaluation's config must be JSON values: {error}") from error
    return write_atomically(path, text + "\n")


def load(path: Path) -> Evaluation:
    """Read a file that `save` wrote.

    Raises:
      DataError: The file doesn't exist, isn't JSON, or isn't an evaluation of this version.
    """
    advice = "run `gmeta evaluate --json FILE` to make one"
    try:
        return from_json(parse_json(path.read_text("utf-8")))
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}", path=path, advice=advice) from error
    except DataError as error:
        raise DataError(str(error), path=path, advice=advice) from error
    except ValueError as error:
        raise DataError(f"not JSON: {error}", path=path, advice=advice) from error
