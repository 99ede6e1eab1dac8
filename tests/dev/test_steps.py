"""Stamped steps: what runs, what runs again, and what a failure leaves behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "dev"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of tools/dev, which are scripts and no package."""
    monkeypatch.syspath_prepend(TOOLS)
    names = [path.stem for path in TOOLS.glob("*.py")]
    yield __import__
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def steps(tools: Callable[[str], ModuleType], tmp_path: Path) -> ModuleType:
    module = tools("steps")
    module.make = lambda: module.Steps(tmp_path / "stamps", tmp_path / "build" / "setup.log")
    return module


def test_a_step_runs_once(steps: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    for _ in range(2):
        steps.make().step("packages", "the packages", "v1", lambda: ran.append("packages"))
    assert ran == ["packages"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("setup: the packages ... ")
    assert line.endswith(" s")


def test_a_step_runs_again_when_what_it_depends_on_changes(steps: ModuleType) -> None:
    ran: list[str] = []
    for fingerprint in ("v1", "v2", "v2", "v1"):
        steps.make().step("packages", "the packages", fingerprint, lambda: ran.append("packages"))
    assert len(ran) == 3


@pytest.mark.parametrize("end", [KeyboardInterrupt, ValueError])
def test_an_interrupted_step_is_due_again(steps: ModuleType, end: type[BaseException]) -> None:
    def interrupted() -> None:
        raise end

    steps.make().step("packages", "the packages", "v1", lambda: None)
    with pytest.raises(end):
        steps.make().step("packages", "the packages", "v2", interrupted)
    assert steps.make().due("packages", "v1")
    assert steps.make().due("packages", "v2")


def test_a_failed_command_says_why_and_where_the_rest_is(steps: ModuleType, tmp_path: Path) -> None:
    code = "print('one'); print('a.cc:3: error: no such thing'); raise SystemExit(1)"
    with pytest.raises(steps.SetupError) as caught:
        steps.make().run(sys.executable, "-c", code)
    log = tmp_path / "build" / "setup.log"
    assert str(caught.value) == f"a.cc:3: error: no such thing; the whole output is in {log}"
    assert "one\n" in log.read_text()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "ERROR: Could not find a version that satisfies the requirement x==1",
            "can't reach a package index",
        ),
        ("g++: fatal error: Killed signal terminated program cc1plus", "ran out of memory"),
        ("", "it failed without a word"),
        ("something\nelse", "else"),
    ],
)
def test_known_failures_are_translated(steps: ModuleType, output: str, said: str) -> None:
    with pytest.raises(steps.SetupError, match=said):
        steps.make().run(sys.executable, "-c", f"print({output!r}); raise SystemExit(1)")


def test_commands_get_no_stdin_and_no_outer_make(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "-j7 --jobserver-auth=3,4")
    code = "import os, sys; print(repr(sys.stdin.read()), os.environ.get('MAKEFLAGS'), os.environ['MORE'])"
    steps.make().run(sys.executable, "-c", code, env={"MORE": "yes"})
    assert "'' None yes" in (tmp_path / "build" / "setup.log").read_text()


def test_a_digest_depends_on_names_and_contents(steps: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    (folder / "deep").mkdir(parents=True)
    seen = {steps.digest([folder])}
    (folder / "deep" / "a.h").write_text("1")
    seen.add(steps.digest([folder]))
    (folder / "deep" / "a.h").write_text("2")
    seen.add(steps.digest([folder]))
    (folder / "deep" / "a.h").rename(folder / "deep" / "b.h")
    seen |= {steps.digest([folder]), steps.digest([folder, "text"])}
    assert len(seen) == 5


def test_a_second_set_up_waits_for_the_first(steps: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "setup.lock"
    code = f"""
import sys, pathlib
sys.path.insert(0, {str(TOOLS)!r})
from steps import only_one
with only_one(pathlib.Path({str(lock)!r})): print("mine")
"""
    with steps.only_one(lock):
        second = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert second.stderr is not None
        assert second.stderr.readline() == "setup: waiting for another set-up of this checkout\n"
        assert second.poll() is None
    assert second.communicate(timeout=300)[0] == "mine\n"


def test_too_little_disk(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = tools("machine")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1.5e9))
    with pytest.raises(machine.SetupError, match=r"1.5 GB free at .*, but set-up needs \d+ GB: free some"):
        machine.check_disk(tmp_path)


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_a_python_without_venv(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    machine = tools("machine")
    monkeypatch.setattr(
        machine.importlib.util, "find_spec", lambda name: None if name == missing else SimpleNamespace()
    )
    with pytest.raises(machine.SetupError, match=f"has no module {missing}: apt-get install python3-venv"):
        machine.check_python()


def test_pins_that_differ_between_pythons_get_markers(tools: Callable[[str], ModuleType]) -> None:
    pin = tools("pin")
    resolved = {
        "3.10": {"same": "1", "old": "1", "tomli": "2"},
        "3.11": {"same": "1", "old": "2"},
        "3.12": {"same": "1", "old": "2"},
    }
    assert pin.merge(resolved) == [
        'old==1 ; python_version <= "3.10"',
        'old==2 ; python_version >= "3.11"',
        "same==1",
        "tomli==2",
    ]
