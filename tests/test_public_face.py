"""The public names: which they are, where others have moved to, and that functions read their arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gmeta

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted(path.relative_to(ROOT).parent for path in (ROOT / "gmeta").rglob("__init__.py"))
PACKAGES = [".".join(path.parts) for path in FOLDERS if not {"testing", "cli"} & set(path.parts)]
PACKAGES += ["gmeta.optimizers"]
PUBLIC = {
    "gmeta": "Pipeline init",
    "gmeta.callbacks": "AdaptationCurve ProgressiveEvaluation StepTimes",
    "gmeta.checkpoint": "ShardedCheckpoint export_table import_table",
    "gmeta.export": "Publisher StateCache export_model",
    "gmeta.initializers": "Constant Normal TruncatedNormal Uniform Zeros",
    "gmeta.io": (
        "After AfterSteps ArrowSource Balance Flag HBaseSource HistoryStore ReadOptions ReadingPosition "
        "RecentHistories RocksDBSource ScaledPool SequenceCost StreamPosition distribute groups join "
        "join_features late rows sequences stream tasks write_predictions"
    ),
    "gmeta.layers": "EmbeddingCollection FeatureConfig FuXi HSTU MLP MMoE TableConfig record_lookups",
    "gmeta.losses": "MultiTaskBCE SampledSoftmax",
    "gmeta.meta": "Adam HeadPrior InnerLoop Momentum SGD",
    "gmeta.metrics": "AUC GAUC NDCG NextItem UserGAUC",
    "gmeta.models": (
        "CBML DCN FlatRetriever GRM GenerativeRetriever JointOptimizer MetaGRM MetaModel Model NextItemModel "
        "TaskLearner TwoTower UserStates dlrm factor_ridge max_tokens melu"
    ),
    "gmeta.ops": "AttentionMask HashTable Jagged RelativeBias hash_ids hash_text hstu_attention jagged",
    "gmeta.optimizers": "Adagrad Adam AdamW Ftrl Momentum OneCycle RowPrior RowWiseAdagrad SGD Warmup",
    "gmeta.policies": "Bloom CountAdmission LFU LRU MinNorm ProbabilityAdmission TTL Tiers TwoPrecisions",
    "gmeta.preprocess": (
        "ColumnSpec HistorySpec PrepareConfig SyntheticConfig TableSpec cooccurrence_vectors prepare "
        "prepare_on_spark semantic_ids"
    ),
    "gmeta.reinforcement": "DPO ECPO GRPO PolicyTraining Rollouts rewards",
}
"""Namespace -> its names, besides the namespaces themselves. A name is here because scripts import it."""
MOST_NAMES = 120

MOVED = [
    (package, name, place)
    for package in PACKAGES
    for name, place in getattr(importlib.import_module(package), "_MOVED", {}).items()
]
"""Package, the name that it had, its module now."""

# Methods of which another class reads what this one doesn't need.
FOR_OTHER_FORMS = {
    "Momentum.direction": {"step"},  # Adam corrects its moments by it
    "SGD.direction": {"step"},
    "SGD.start": {"parameter"},  # it keeps nothing of a parameter's shape
    "TaskLearner.start_weights": {"view"},  # of CBML tasks start from what their samples say
    "TaskLearner.view": {"training"},  # of MetaGRM the trunk makes the inputs
}


def public_callables(package: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions, constructors and methods by name; overrides answer to the class that they override."""
    room = importlib.import_module(package)
    things = {name: getattr(room, name) for name in room.__all__}
    moved = [place if ":" in place else f"{place}:{name}" for of, name, place in MOVED if of == package]
    things |= {place.partition(":")[2]: pkgutil.resolve_name(place) for place in moved}
    for name, thing in things.items():
        if inspect.isclass(thing):
            for method, found in vars(thing).items():
                function = getattr(found, "__func__", found)  # of a class method
                inherited = any(method in vars(base) for base in thing.__mro__[1:] if base is not object)
                if (
                    inspect.isfunction(function)
                    and not inherited
                    and (method[0] != "_" or method == "__init__")
                ):
                    yield f"{name}.{method}", function
        elif inspect.isfunction(thing):
            yield name, thing


def arguments_not_read(function: Callable[..., Any]) -> set[str]:
    """Names of the signature that the body never loads."""
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):
        return set()  # a dataclass wrote it
    body = [node for node in tree.body[0].body if not isinstance(node, ast.Expr)]  # type: ignore[attr-defined]
    if not body or isinstance(body[0], ast.Raise):
        return set()  # derived classes say what it does
    read = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return set(inspect.signature(function).parameters) - read - {"self", "cls"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_argument_is_read(package: str) -> None:
    ignored = {name: arguments_not_read(function) for name, function in public_callables(package)}
    ignored = {name: found - FOR_OTHER_FORMS.get(name, set()) for name, found in ignored.items()}
    assert {name: found for name, found in ignored.items() if found} == {}


def test_an_argument_that_is_ignored_is_found() -> None:
    def scale(values: list[float], by: float, clip: float) -> list[float]:
        return [by * value for value in values]

    assert arguments_not_read(scale) == {"clip"}


def test_the_public_names_are_the_listed_ones() -> None:
    rooms = {package for package in PUBLIC if package != "gmeta"}
    listed = {package: set(names.split()) for package, names in PUBLIC.items()}
    listed["gmeta"] |= {room.removeprefix("gmeta.") for room in rooms}
    assert {package: set(importlib.import_module(package).__all__) for package in PUBLIC} == listed
    assert sum(len(names.split()) for names in PUBLIC.values()) <= MOST_NAMES


def test_rooms_that_are_not_public_list_no_names() -> None:
    rooms = {path.parent.name for path in (ROOT / "gmeta").glob("*/__init__.py")} - {"cli"}
    others = [room for room in sorted(rooms) if f"gmeta.{room}" not in PUBLIC]
    assert {room: importlib.import_module(f"gmeta.{room}").__all__ for room in others} == {
        room: [] for room in others
    }


@pytest.mark.parametrize(("package", "name", "place"), MOVED)
def test_a_moved_name_warns_once_and_is_the_same_object(package: str, name: str, place: str) -> None:
    module, _, new = place.partition(":")
    with pytest.warns(DeprecationWarning, match="has moved to") as caught:
        exec(f"from {package} import {name} as found", names := {})
    assert [(str(each.message), each.filename) for each in caught] == [
        (
            f"{package}.{name} has moved to {module}.{new or name}; the old name goes in the next release",
            "<string>",
        )
    ]
    assert names["found"] == pkgutil.resolve_name(f"{module}:{new or name}")
    assert name not in dir(importlib.import_module(package))


def test_a_moved_name_warns_at_the_line_that_uses_it() -> None:
    with pytest.warns(DeprecationWarning, match=r"gmeta\.ops\.padded_attention has moved") as caught:
        gmeta.ops.padded_attention  # noqa: B018
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.shown_by("test_a_moved_name_warns_at_the_line_that_uses_it")  # an error in all tests
def test_gmeta_imports_no_moved_name() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "gmeta").rglob("*.py"))
        if path.name != "__main__.py"
    ]
    code = f"""
import importlib, warnings
import gmeta
warnings.filterwarnings("error", "gmeta.* has moved to", DeprecationWarning)
for name in {modules}:
    importlib.import_module(name)
print("all are imported")
gmeta.ops.padded_attention
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "all are imported\n", done.stderr
    assert "DeprecationWarning: gmeta.ops.padded_attention has moved" in done.stderr
