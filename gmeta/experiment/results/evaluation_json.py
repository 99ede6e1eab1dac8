"""The JSON form of an evaluation: the table as data, for people with jq as much as for gmeta.

::

  {"format": "gmeta-evaluation", "version": 2, "title": ..., "data": {...}, "seeds": [0, 1, 2],
   "methods": [{"name": "maml", "label": "MAML", "description": ...,
                "results": [{"steps": 1, "metrics": {"mae": {"mean": 0.917, "spread": 0.009,
                                                              "per_seed": [0.91, 0.92, 0.92]}, ...}}, ...]}],
   "splits": [{"name": "item_cold", "tasks": 2863, "methods": [{"name": "maml", "results": [...]}]}],
   "support_curve": {"steps": 1, "methods": [{"name": "maml", "points": [{"ratings": 4, "mae": {...}}]}]},
   "training": [{"name": "maml", "runs": [{"epoch": [1, 2], "curves": {"loss": [...], "mae": [...]}}]}],
   "config": {...}, "notes": [...], "seconds": {"train": 61.5}}

``mean`` and ``spread`` (sample standard deviation) are there for other readers; gmeta computes them again
from ``per_seed``. A number that isn't finite is ``null``, and is read back as nan. What has an order is a
list, because not every reader keeps the order of an object's keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import write_atomically
from gmeta.experiment.results.evaluation import (
    DataDescription,
    Evaluation,
    MethodResult,
    SplitResult,
    TrainingRun,
)
from gmeta.experiment.results.spread import Spread

T = TypeVar("T")


FORMAT, VERSION = "gmeta-evaluation", 2


def to_json(evaluation: Evaluation) -> dict[str, Any]:
    """Encode an evaluation as JSON values."""
    return {"format": FORMAT, "version": VERSION, **_encode(evaluation)}


def from_json(value: object) -> Evaluation:
    """Decode what `to_json` encoded.

    Raises:
      DataError: Another format or version, or a part that is missing or of the wrong kind.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError(f"not a {FORMAT} document")
    if value.get("version") != VERSION:
        raise DataError(f"version {value.get('version')!r}, this gmeta reads version {VERSION}")
    return _decode(value)


def save(evaluation: Evaluation, path: Path) -> Path:
    """Write an evaluation as a JSON file, whole or not at all.

    Raises:
      ConfigError: ``config`` holds something that JSON can't say.
    """
    try:
        text = json.dumps(to_json(evaluation), indent=1, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the evaluation's config must be JSON values: {error}") from error
    return write_atomically(path, text + "\n")


def load(path: Path) -> Evaluation:
    """Read a file that `save` wrote.

    Raises:
      DataError: No such file, not JSON, or not an evaluation of this version.
    """
    advice = "run `gmeta evaluate --json FILE` to make one"
    try:
        return from_json(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise DataError(f"can't be read: {error.strerror}", path=path, advice=advice) from error
    except DataError as error:
        raise DataError(str(error), path=path, advice=advice) from error
    except ValueError as error:
        raise DataError(f"not JSON: {error}", path=path, advice=advice) from error


def _encode(evaluation: Evaluation) -> dict[str, Any]:
    """The body of the document, without format and version."""
    data = evaluation.data
    return {
        "title": evaluation.title,
        "data": {
            "name": data.name,
            "warm_tasks": data.warm_tasks,
            "cold_tasks": data.cold_tasks,
            "rows": data.rows,
            "split": data.split,
        },
        "seeds": [int(seed) for seed in evaluation.seeds],
        "methods": [
            {
                "name": name,
                "label": method.label,
                "description": method.description,
                "results": _steps(method.results),
            }
            for name, method in evaluation.methods.items()
        ],
        "splits": [
            {
                "name": split,
                "tasks": found.tasks,
                "methods": [
                    {"name": name, "results": _steps(results)} for name, results in found.results.items()
                ],
            }
            for split, found in evaluation.splits.items()
        ],
        "support_curve": {
            "steps": evaluation.support_steps,
            "methods": [
                {
                    "name": name,
                    "points": [{"ratings": int(size), "mae": _spread(mae)} for size, mae in sizes.items()],
                }
                for name, sizes in evaluation.support_curve.items()
            ],
        },
        "training": [
            {
                "name": name,
                "runs": [
                    {
                        "epoch": [int(epoch) for epoch in run.epoch],
                        "curves": {curve: _numbers(values) for curve, values in run.curves.items()},
                    }
                    for run in runs
                ],
            }
            for name, runs in evaluation.training.items()
        ],
        "config": dict(evaluation.config),
        "notes": list(evaluation.notes),
        "seconds": {phase: _number(seconds) for phase, seconds in evaluation.seconds.items()},
    }


def _steps(results: Mapping[int, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    return [
        {
            "steps": int(steps),
            "metrics": {metric: _spread(values) for metric, values in metrics.items()},
        }
        for steps, metrics in results.items()
    ]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    spread = Spread.of([float(value) for value in values])
    return {"mean": _number(spread.mean), "spread": spread.deviation, "per_seed": _numbers(values)}


def _decode(document: Mapping[str, Any]) -> Evaluation:
    """The evaluation in a document whose format and version are known to fit.

    Raises:
      DataError: A part is missing or of the wrong kind, or two parts contradict each other; the message
        names the part by its path in the document.
    """
    root = Node(document, "")
    data, curve = root["data"], root["support_curve"]
    steps = curve["steps"]
    try:
        return Evaluation(
            title=root["title"].of(str),
            data=DataDescription(
                data["name"].of(str),
                data["warm_tasks"].of(int),
                data["cold_tasks"].of(int),
                data["rows"].of(int),
                data["split"].of(str),
            ),
            seeds=tuple(seed.of(int) for seed in root["seeds"].items()),
            methods={method["name"].of(str): _method(method) for method in root["methods"].items()},
            splits={split["name"].of(str): _split(split) for split in root["splits"].items()},
            config=root["config"].of(dict),
            support_curve={
                method["name"].of(str): {
                    point["ratings"].of(int): point["mae"]["per_seed"].numbers()
                    for point in method["points"].items()
                }
                for method in curve["methods"].items()
            },
            support_steps=None if steps.value is None else steps.of(int),
            training={
                method["name"].of(str): tuple(_run(run) for run in method["runs"].items())
                for method in root["training"].items()
            },
            notes=tuple(note.of(str) for note in root["notes"].items()),
            seconds={phase: node.number() for phase, node in root["seconds"].fields()},
        )
    except ConfigError as error:
        raise DataError(str(error)) from error


def _method(node: Node) -> MethodResult:
    return MethodResult(node["label"].of(str), node["description"].of(str), _results(node["results"]))


def _split(node: Node) -> SplitResult:
    results = {method["name"].of(str): _results(method["results"]) for method in node["methods"].items()}
    return SplitResult(node["tasks"].of(int), results)


def _results(node: Node) -> dict[int, dict[str, tuple[float, ...]]]:
    return {
        result["steps"].of(int): {
            metric: value["per_seed"].numbers() for metric, value in result["metrics"].fields()
        }
        for result in node.items()
    }


def _run(node: Node) -> TrainingRun:
    epoch = tuple(epoch.of(int) for epoch in node["epoch"].items())
    return TrainingRun(epoch, {name: curve.numbers() for name, curve in node["curves"].fields()})


class Node:
    """A value in a JSON document that knows its path, so that every error can name it."""

    def __init__(self, value: object, path: str) -> None:
        self.value, self.path = value, path

    def of(self, kind: type[T]) -> T:
        """The value, if it is a ``kind``; a boolean is no number."""
        if not isinstance(self.value, kind) or isinstance(self.value, bool):
            raise DataError(f"{self.path or 'document'}: {kind.__name__} expected, got {self.value!r:.60}")
        return self.value

    def number(self) -> float:
        """The number; ``null`` is nan."""
        if self.value is None:
            return math.nan
        return float(self.value if isinstance(self.value, float) else self.of(int))

    def numbers(self) -> tuple[float, ...]:
        """The numbers of a list."""
        return tuple(item.number() for item in self.items())

    def items(self) -> list[Node]:
        """The elements of a list."""
        return [Node(item, f"{self.path}[{i}]") for i, item in enumerate(self.of(list))]

    def fields(self) -> list[tuple[str, Node]]:
        """The fields of an object."""
        value = cast("dict[str, object]", self.of(dict))
        return [(name, Node(item, f"{self.path}.{name}".lstrip("."))) for name, item in value.items()]

    def __getitem__(self, name: str) -> Node:
        value = cast("dict[str, object]", self.of(dict))
        if name not in value:
            raise DataError(f"{f'{self.path}.{name}'.lstrip('.')} is missing")
        return Node(value[name], f"{self.path}.{name}".lstrip("."))
