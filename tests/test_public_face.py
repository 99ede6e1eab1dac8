"""What users call reads every argument that it takes: nothing that a user passes is ignored in silence."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted(path.relative_to(ROOT).parent for path in (ROOT / "gmeta").rglob("__init__.py"))
PACKAGES = [".".join(path.parts) for path in FOLDERS if not {"testing", "cli"} & set(path.parts)]
PACKAGES += ["gmeta.optimizers"]
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
    for name in room.__all__:
        thing = getattr(room, name)
        if inspect.isclass(thing):
            for method, function in vars(thing).items():
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
