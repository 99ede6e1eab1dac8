"""Who may import whom: between the rooms of gmeta, and between the layers of the native code.

The rules keep cores testable without TensorFlow, `import gmeta` quick, and rooms replaceable. They are read
from the source, so that an import inside a function counts too.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gmeta"
SETTINGS = frozenset({"optimizers", "policies", "initializers"})  # of tables
MODELS = frozenset({"core", "ops", "layers", "losses", "meta", "metrics"}) | SETTINGS
EVERY = MODELS | {
    "io",
    "preprocess",
    "models",
    "checkpoint",
    "export",
    "experiment",
    "callbacks",
    "reinforcement",
}
# Room -> the rooms that it may import besides its own.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "optimizers": frozenset({"core"}),
    "policies": frozenset({"core"}),
    "initializers": frozenset({"core"}),
    "ops": SETTINGS | {"core"},
    "io": frozenset({"core"}),
    "preprocess": frozenset({"core"}),
    "meta": frozenset({"core"}),
    "losses": frozenset({"core", "ops"}),
    "metrics": frozenset({"core"}),
    "layers": SETTINGS | {"core", "ops"},
    "models": MODELS | {"checkpoint"},
    "reinforcement": MODELS | {"models", "preprocess"},
    "checkpoint": frozenset({"core", "ops", "io", "policies"}),
    "export": frozenset({"core", "ops", "layers", "models"}),
    "experiment": EVERY - {"callbacks"},
    "callbacks": EVERY,  # a door: nothing imports it
    "testing": EVERY,  # for tests alone
    "cli": EVERY,  # the way in; nothing imports it
    "selftest": frozenset({"ops", "optimizers", "testing"}),  # nothing imports it
}
PYTHON = sorted(PACKAGE.rglob("*.py"))
NATIVE = sorted(
    path
    for room in ("ops", "io")
    for path in (ROOT / room).rglob("*")
    if path.suffix in (".h", ".cuh", ".cc", ".cu")
)
# What a core may include besides its own headers: C++ by a bare name, C for an interface of C, the system's,
# intrinsics.
STANDARD = re.compile(
    r"[a-z_]+|stdint\.h|[a-z]*intrin\.h|sys/[a-z]+\.h|netinet/[a-z]+\.h|arpa/inet\.h"
    r"|(dlfcn|fcntl|linux/io_uring|netdb|sched|unistd)\.h"
)
CUDA = re.compile(r"cuda[a-z0-9_]*\.(h|hpp)|cub/.+|cooperative_groups(/.+)?\.h|cuda/.+|mma\.h")


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    """The room of a module; "" for the package's own `__init__` and `__main__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts[0].startswith("__") else parts[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Full names of what a module imports, `from package import name` as package.name."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else list(package[: len(package) - node.level + 1])
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


MODULES = {module_of(path): path for path in PYTHON}


def all_imports(path: Path) -> list[str]:
    return list(imports(ast.parse(path.read_text(), shown(path)), path))


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def modules_imported_by(path: Path) -> set[str]:
    """The modules of gmeta that a module imports, in functions and for types too."""
    found = set()
    for name in all_imports(path):
        parts = name.split(".")
        while parts and ".".join(parts) not in MODULES:
            parts.pop()
        found.add(".".join(parts))
    return found - {"", module_of(path)}


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """The names along one circle of a graph; none if it has no circle."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_has_a_rule() -> None:
    assert {room_of(path) for path in PYTHON} - {""} == set(MAY_IMPORT)


def test_no_circle_joins_modules() -> None:
    assert circle({name: modules_imported_by(path) for name, path in MODULES.items()}) == []


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_no_circle_joins_rooms(depth: int) -> None:
    """A room is a folder with all that is below it; its `__init__` is a door, which isn't counted."""
    arrows: dict[str, set[str]] = {}

    def room(name: str) -> str:
        within = name if MODULES[name].stem == "__init__" or name.count(".") == 1 else name.rpartition(".")[0]
        return ".".join(within.split(".")[:depth])

    for name, path in MODULES.items():
        if path.stem != "__init__" and name.count("."):
            rooms = {room(other) for other in modules_imported_by(path) if "." in other}
            arrows.setdefault(room(name), set()).update(rooms - {room(name)})
    assert circle(arrows) == []


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(), shown(path))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}


def test_no_module_bears_the_name_of_a_function_of_its_room() -> None:
    """`gmeta.io.tasks` would be two things then, whichever was imported last."""
    of_room: dict[str, set[str]] = {}
    for path in PYTHON:
        of_room.setdefault(room_of(path), set()).update(functions_of(path))
    alike = [shown(path) for path in PYTHON if room_of(path) and path.stem in of_room[room_of(path)]]
    assert alike == []


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if path.stem == "__init__"])
def test_a_package_says_what_is_public(name: str) -> None:
    package = importlib.import_module(name)
    assert len(package.__all__) == len(set(package.__all__))
    for public in package.__all__:
        assert hasattr(package, public), public


def test_no_folder_holds_more_than_fifteen_modules() -> None:
    count = Counter(shown(path.parent) for path in PYTHON if path.stem != "__init__")
    assert {folder: n for folder, n in count.items() if n > 15} == {}


@pytest.mark.parametrize("path", [p for p in PYTHON if room_of(p)], ids=shown)
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    used = {
        parts[1] for name in all_imports(path) if (parts := name.split("."))[0] == "gmeta" and len(parts) > 1
    }
    assert sorted(used & set(MAY_IMPORT) - MAY_IMPORT[room] - {room}) == []


@pytest.mark.parametrize("path", PYTHON, ids=shown)
def test_the_package_imports_nothing_that_stands_on_it(path: Path) -> None:
    outside = {"models", "tools", "tests", "setup"}
    assert [name for name in all_imports(path) if name.split(".")[0] in outside] == []


def test_one_package_imports_horovod() -> None:
    users = [p for p in PYTHON if any(name.split(".")[0] == "horovod" for name in all_imports(p))]
    assert users
    assert all(PACKAGE / "core" / "collectives" in path.parents for path in users)


def test_preprocessing_loads_no_tensorflow() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in PYTHON
        if room_of(path) == "preprocess" and path.stem != "__init__"
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_native_rooms_have_sources() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in NATIVE} == {"ops", "io"}


CORES = [p for p in NATIVE if p.suffix in (".h", ".cuh", ".cu") and not p.stem.startswith("kernels")]


@pytest.mark.parametrize("path", CORES, ids=shown)
def test_a_core_needs_only_the_standard_library(path: Path) -> None:
    allowed = [STANDARD] if path.suffix == ".h" else [STANDARD, CUDA]
    foreign = [
        name
        for name in includes(path)
        if not (ROOT / name).is_file() and not any(pattern.fullmatch(name) for pattern in allowed)
    ]
    assert foreign == []


@pytest.mark.parametrize("path", [p for p in NATIVE if p.suffix == ".h"], ids=shown)
def test_a_header_is_included_once(path: Path) -> None:
    guard = f"GMETA_{shown(path).upper().replace('/', '_').replace('.', '_')}_"
    text = path.read_text()
    assert "#pragma once" in text or (f"#ifndef {guard}" in text and f"#define {guard}" in text)


@pytest.mark.parametrize("path", NATIVE, ids=shown)
def test_native_rooms_share_only_the_common_one(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    other = {"ops": "io", "io": "ops"}[own]
    borrowed = [name for name in includes(path) if name.startswith(f"{other}/")]
    assert [name for name in borrowed if not name.startswith("ops/common/")] == []


@pytest.mark.parametrize("path", [p for p in NATIVE if p.name == "ops.cc"], ids=shown)
def test_ops_files_only_register(path: Path) -> None:
    text = path.read_text()
    assert "REGISTER_OP(" in text
    assert not re.search(r"REGISTER_KERNEL_BUILDER|\bOpKernel\b", text)
    foreign = [name for name in includes(path) if not name.startswith("tensorflow/core/framework/")]
    assert [name for name in foreign if not STANDARD.fullmatch(name)] == []


@pytest.mark.parametrize("path", [p for p in NATIVE if p.name.startswith("kernels")], ids=shown)
def test_kernels_do_not_register_ops(path: Path) -> None:
    assert "REGISTER_OP(" not in path.read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "tests/native").glob("*.cc")), ids=shown)
def test_native_tests_know_no_tensorflow(path: Path) -> None:
    assert [name for name in includes(path) if name.startswith(("tensorflow", "absl", "unsupported"))] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import horovod.tensorflow as hvd", ["horovod.tensorflow"]),
        ("def f():\n  from gmeta.ops.table import hash_table", ["gmeta.ops.table.hash_table"]),
        ("from . import zoo", ["gmeta.models.zoo"]),
        ("from ..export.signature import Signature", ["gmeta.export.signature.Signature"]),
    ],
)
def test_the_reader_of_imports_sees_every_form(source: str, found: list[str]) -> None:
    assert list(imports(ast.parse(source), PACKAGE / "models" / "a_model.py")) == found
