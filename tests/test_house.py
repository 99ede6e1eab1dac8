"""The habits of the house: what every file keeps to, whoever writes it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 500  # lines; what is longer holds more than one idea
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
# Whose machine a path is from, and whose mirror a host is, is nobody else's business. In pieces, so that this
# file isn't its own offender.
PRIVATE = re.compile(
    r"(?<![\w.~$})/])/(?:work|root|tmp|home|mnt|Users)/[\w.-]"
    r"|\b(?:pypi\.org|pythonhosted\.org|index-url|trusted-host|find-links)\b"
    r"|file:" + "///"
)


def tracked() -> list[Path]:
    """The files that git knows, or would take."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def environment(python: str) -> dict[str, str]:
    """What markers are evaluated in."""
    return {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}


def holds(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(environment(python))


def requirements() -> list[tuple[str, Requirement]]:
    """Each supported Python with each requirement of pyproject.toml that it has."""
    value = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = value["project"]["optional-dependencies"].values()
    wanted = [*value["project"]["dependencies"], *value["build-system"]["requires"]]
    own = f"{value['project']['name']}["
    lines = sorted({*wanted, *(line for lines in extras for line in lines if not line.startswith(own))})
    every = [(python, Requirement(line)) for python in SUPPORTED for line in lines]
    return [(python, requirement) for python, requirement in every if holds(requirement, python)]


@pytest.fixture(scope="module")
def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_no_file_names_a_machine_or_a_registry() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so what belongs to the project can't be told")
    offenders = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in (".png", ".npz"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            offenders += [f"{shown(path)}:{number}: {line.strip()}" for _ in PRIVATE.finditer(line)]
    assert offenders == []


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("/tm" + "p/x", True),
        ("see /ro" + "ot/.cache", True),
        ("https://pypi" + ".org/simple", True),
        ("/usr/bin/python3", False),
        ("tests/tm" + "p/x", False),
        ("$(HOME)/tm" + "p/x", False),
    ],
)
def test_what_counts_as_private(text: str, private: bool) -> None:
    assert bool(PRIVATE.search(text)) is private


def test_a_requirement_has_one_pin_on_each_python(pins: list[Requirement]) -> None:
    for python, wanted in requirements():
        found = [pin for pin in pins if pin.name == wanted.name and holds(pin, python)]
        versions = [next(iter(pin.specifier)).version for pin in found]
        assert len(versions) == 1, (python, wanted)
        assert wanted.specifier.contains(versions[0], prereleases=True), (python, wanted)


def test_every_pin_is_exact(pins: list[Requirement]) -> None:
    assert [str(pin) for pin in pins if [s.operator for s in pin.specifier] != ["=="]] == []


def test_the_changelog_has_a_place_for_what_comes() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"


def test_the_build_server_runs_what_a_developer_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111 == 0o111
    assert script.read_text().rstrip().splitlines()[-2:] == ["make test", "make test-longer"]


def test_models_are_walked_by_the_function_that_works_with_every_wrapt() -> None:
    """``tf.Module.submodules`` doesn't: see `gmeta.core.keras.submodules`."""
    rooms, own = ("gmeta", "models", "tools"), ROOT / "gmeta" / "core" / "keras.py"
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py") if path != own]
    assert [shown(path) for path in files if re.search(r"\w\.submodules\b", path.read_text())] == []


SOURCES = [
    path
    for pattern in (
        "gmeta/**/*.py",
        "tools/**/*.py",
        "tests/**/*.py",
        "ops/**/*.*",
        "io/**/*.*",
        "tests/**/*.cc",
    )
    for path in sorted(ROOT.glob(pattern))
]


def test_files_hold_one_idea() -> None:
    lines = {shown(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: count for path, count in lines.items() if count > LONGEST} == {}


def test_no_module_refers_readers_to_itself() -> None:
    """What a module says of itself names a class or a function in it, not the module that is being read."""
    found = []
    for path in sorted((ROOT / "gmeta").rglob("*.py")):
        module = shown(path.with_suffix("")).replace("/", ".")
        lines = enumerate(path.read_text().splitlines(), 1)
        found += [f"{shown(path)}:{number}" for number, line in lines if f"`{module}`" in line]
    assert found == []


TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def can_fail(function: ast.FunctionDef) -> bool:
    """Whether a test asserts something, itself or through a helper that says so by its name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if re.match(r"raises$|warns$|fail$|assert|check|expect", name):
                return True
    return False


def test_every_test_can_fail() -> None:
    cannot = []
    for path in TESTS:
        functions = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        assert functions, path
        cannot += [f"{shown(path)}: {each.name}" for each in functions if not can_fail(each)]
    assert cannot == []


def test_tests_lie_in_the_rooms_that_they_test() -> None:
    rooms = {path.parent.name for path in (ROOT / "gmeta").glob("*/__init__.py")}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in TESTS if path.parent.name != "tests"}
    assert sorted(folders - rooms - {"native", "cuda", "distributed", "dev", "tools", "docs"}) == []
    assert {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("__init__.py")} == {
        "support"
    }
