"""Stamped steps: what runs, what runs again, and what a failure leaves behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
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
    module.make = lambda: module.Steps(tmp_path / "stamps", tmp_path / "logs")
    return module


def packages(steps: ModuleType, fingerprint: str, action: Callable[[object], object]) -> object:
    return steps.Step("packages", "the packages", fingerprint, action)


def test_a_step_runs_once(steps: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[object] = []
    for _ in range(2):
        steps.make().do(packages(steps, "v1", ran.append))
    assert len(ran) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("setup: the packages ... ")
    assert line.endswith(" s")


def test_a_step_runs_again_when_what_it_depends_on_changes(steps: ModuleType) -> None:
    ran: list[object] = []
    for fingerprint in ("v1", "v2", "v2", "v1"):
        steps.make().do(packages(steps, fingerprint, ran.append))
    assert len(ran) == 3


@pytest.mark.parametrize("end", [KeyboardInterrupt, ValueError])
def test_an_interrupted_step_is_due_again(steps: ModuleType, end: type[BaseException]) -> None:
    def interrupted(_: object) -> None:
        raise end

    steps.make().do(packages(steps, "v1", lambda _: None))
    with pytest.raises(end):
        steps.make().do(packages(steps, "v2", interrupted))
    assert steps.make().due(packages(steps, "v1", interrupted))
    assert steps.make().due(packages(steps, "v2", interrupted))


def test_a_failed_command_says_why_and_where_the_rest_is(steps: ModuleType, tmp_path: Path) -> None:
    code = "print('one'); print('a.cc:3: error: no such thing'); raise SystemExit(1)"
    log = steps.Log(tmp_path / "logs" / "native.log")
    with pytest.raises(steps.SetupError) as caught:
        log.run(sys.executable, "-c", code)
    assert str(caught.value) == f"a.cc:3: error: no such thing; the whole output is in {log.path}"
    assert caught.value.tail == ["one", "a.cc:3: error: no such thing"]
    assert "one\n" in log.path.read_text()


def wait_for(path: Path, text: str) -> str:
    """A shell command that waits until a file holds a text."""
    return f"until grep -qs {text} {path}; do sleep 0.05; done"


def test_steps_side_by_side_write_a_log_each(steps: ModuleType, tmp_path: Path) -> None:
    def meet(name: str, other: str) -> object:
        meeting = f"echo {name} is here; {wait_for(tmp_path / 'logs' / f'{other}.log', f'{other}.is.here')}"
        return steps.Step(name, name, "v1", lambda log: log.run("sh", "-c", meeting))

    steps.make().do(meet("first", "second"), meet("second", "first"))
    for name in ("first", "second"):
        _, printed = (tmp_path / "logs" / f"{name}.log").read_text().rstrip().rsplit("\n", 1)
        assert printed == f"{name} is here"
    assert {path.name for path in (tmp_path / "stamps").iterdir()} == {"first", "second"}


def gone(pid: int) -> bool:
    """Whether a process has ended; one that its new parent hasn't asked for yet has."""
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


# A command with a child that would go on for long after it.
LONG = "sleep 1000 & echo $! >> {pids}; echo $$ >> {pids}; wait"


def test_a_step_that_fails_ends_the_other_one(steps: ModuleType, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    long = LONG.format(pids=pids)
    both = f"[ $(cat {pids} 2>/dev/null | wc -l) = 2 ]"
    fails = f"until {both}; do sleep 0.05; done; echo 'error: no thing'; exit 3"
    with pytest.raises(steps.SetupError, match=r"^error: no thing; the whole output is in .*short\.log$"):
        steps.make().do(
            steps.Step("long", "long", "v1", lambda log: log.run("sh", "-c", long)),
            steps.Step("short", "short", "v1", lambda log: log.run("sh", "-c", fails)),
        )
    assert all(gone(int(pid)) for pid in pids.read_text().split())
    assert not (tmp_path / "stamps").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.shown_by(case="2")
def test_an_interrupted_set_up_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    pids = tmp_path / "pids"
    code = f"""
import pathlib, sys
sys.path.insert(0, {str(TOOLS)!r})
from steps import Step, Steps, set_up
folder = pathlib.Path({str(tmp_path)!r})
run = lambda log: log.run("sh", "-c", {LONG.format(pids=pids)!r})
make = lambda steps: steps.do(Step("one", "one", "v1", run), Step("two", "two", "v1", run))
sys.exit(set_up(folder / "setup.lock", lambda: Steps(folder / "stamps", folder / "logs"), make, "never"))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not pids.exists() or len(pids.read_text().split()) < 4:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.communicate(timeout=300)[1] == "setup: interrupted; the next call goes on from here\n"
    assert process.returncode == 130
    assert all(gone(int(pid)) for pid in pids.read_text().split())


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "ERROR: Could not find a version that satisfies the requirement x==1",
            "can't reach a package index",
        ),
        (
            "CMake Error at cmake/cuda.cmake:18 (message):\n  GMETA_CUDA=ON, but\n  no nvcc\n\n\n-- Done",
            "^GMETA_CUDA=ON, but no nvcc; the whole",
        ),
        ("g++: fatal error: Killed signal terminated program cc1plus", "ran out of memory"),
        ("", "it failed without a word"),
        ("something\nelse", "else"),
    ],
)
def test_known_failures_are_translated(steps: ModuleType, output: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(steps.SetupError, match=said):
        steps.Log(tmp_path / "log").run(sys.executable, "-c", f"print({output!r}); raise SystemExit(1)")


def test_commands_get_no_stdin_and_no_outer_make(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "-j7 --jobserver-auth=3,4")
    code = "import os, sys; print(repr(sys.stdin.read()), os.environ.get('MAKEFLAGS'), os.environ['MORE'])"
    steps.Log(tmp_path / "log").run(sys.executable, "-c", code, env={"MORE": "yes"})
    assert "'' None yes" in (tmp_path / "log").read_text()


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
