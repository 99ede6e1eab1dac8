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
    "training",
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
    "training": MODELS | {"checkpoint"},
    "models": MODELS | {"checkpoint", "training"},
    "reinforcement": MODELS | {"models", "preprocess", "training"},
    "checkpoint": frozenset({"core", "ops", "io", "policies"}),
    "export": frozenset({"core", "ops", "layers", "models", "training"}),
    "experiment": EVERY - {"callbacks"},
    "callbacks": EVERY,  # a door: nothing imports it
    "testing": EVERY,  # for tests and the selftest
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


@pytest.mark.parametrize("depth", [2, 3])
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


def test_packages_list_what_is_public() -> None:
    for name in (name for name, path in MODULES.items() if path.stem == "__init__"):
        package = importlib.import_module(name)
        public = getattr(package, "__all__", [])
        assert len(public) == len(set(public)), name
        assert [each for each in public if not hasattr(package, each)] == [], name


def test_folders_nest_two_deep_and_open_with_a_docstring() -> None:
    folders = {path.parent for path in PYTHON}
    assert [shown(each) for each in folders if len(each.relative_to(PACKAGE).parts) > 2] == []
    doors = [ast.parse((each / "__init__.py").read_text()) for each in folders]
    assert all(ast.get_docstring(door) for door in doors)


def test_rooms_import_only_what_they_may() -> None:
    offenders = []
    for path in (path for path in PYTHON if room_of(path)):
        room = room_of(path)
        names = (name.split(".") for name in all_imports(path))
        used = {parts[1] for parts in names if parts[0] == "gmeta" and len(parts) > 1}
        found = sorted(used & set(MAY_IMPORT) - MAY_IMPORT[room] - {room})
        offenders += [f"{shown(path)} imports gmeta.{each}" for each in found]
    assert offenders == []


def test_the_package_imports_nothing_that_stands_on_it() -> None:
    outside = {"models", "tools", "tests", "support", "setup"}
    users = {shown(path): {name.split(".")[0] for name in all_imports(path)} & outside for path in PYTHON}
    assert {path: found for path, found in users.items() if found} == {}


def test_collectives_and_their_launcher_alone_import_horovod() -> None:
    users = [p for p in PYTHON if any(name.split(".")[0] == "horovod" for name in all_imports(p))]
    assert users
    homes = {PACKAGE / "core" / "collectives", PACKAGE / "core" / "launcher"}
    assert {path.parent for path in users} <= homes


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


def test_cores_need_only_the_standard_library() -> None:
    foreign = []
    for path in CORES:
        allowed = [STANDARD] if path.suffix == ".h" else [STANDARD, CUDA]
        foreign += [
            f"{shown(path)} includes {name}"
            for name in includes(path)
            if not (ROOT / name).is_file() and not any(pattern.fullmatch(name) for pattern in allowed)
        ]
    assert foreign == []


def test_headers_are_included_once() -> None:
    unguarded = []
    for path in (path for path in NATIVE if path.suffix == ".h"):
        guard = f"GMETA_{shown(path).upper().replace('/', '_').replace('.', '_')}_"
        text = path.read_text()
        if "#pragma once" not in text and not (f"#ifndef {guard}" in text and f"#define {guard}" in text):
            unguarded.append(shown(path))
    assert unguarded == []


def test_native_rooms_share_only_the_common_one() -> None:
    borrowed = []
    for path in NATIVE:
        other = {"ops": "io", "io": "ops"}[path.relative_to(ROOT).parts[0]]
        names = [name for name in includes(path) if name.startswith(f"{other}/")]
        borrowed += [f"{shown(path)}: {name}" for name in names if not name.startswith("ops/common/")]
    assert borrowed == []


def test_ops_files_only_register() -> None:
    files = [path for path in NATIVE if path.name == "ops.cc"]
    assert files
    for path in files:
        text = path.read_text()
        assert "REGISTER_OP(" in text, path
        assert not re.search(r"REGISTER_KERNEL_BUILDER|\bOpKernel\b", text), path
        foreign = [name for name in includes(path) if not name.startswith("tensorflow/core/framework/")]
        assert [name for name in foreign if not STANDARD.fullmatch(name)] == [], path


def test_kernels_do_not_register_ops() -> None:
    files = [path for path in NATIVE if path.name.startswith("kernels")]
    assert files
    assert [shown(path) for path in files if "REGISTER_OP(" in path.read_text()] == []


def test_native_tests_know_no_tensorflow() -> None:
    foreign = ("tensorflow", "absl", "unsupported")
    files = sorted((ROOT / "tests/native").glob("*.cc"))
    assert files
    found = [
        f"{shown(path)}: {name}" for path in files for name in includes(path) if name.startswith(foreign)
    ]
    assert found == []


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
