"""The command line as a whole: help, errors in one line, interrupts, exit codes."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import gmeta
from gmeta.cli import COMMANDS, main
from gmeta.core.errors import ConfigError
from support.process_ranks import own_lines

LAZY = """
import sys
from gmeta.cli import main
main({arguments}, standalone_mode=False)
sys.exit(any(name in sys.modules for name in ("tensorflow", "numpy", "gmeta.cli.prepare", "gmeta.cli.train")))
"""


def seconds_of_children() -> float:
    """What the processors have spent on finished children: no other process's load counts."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Makes `gmeta doctor` raise what is put into the list."""
    raised: list[BaseException] = []

    @click.command()
    def command() -> None:
        raise raised[0]

    monkeypatch.setattr("gmeta.cli.doctor.command", command)
    return raised


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_names_every_command_and_imports_none(arguments: list[str]) -> None:
    start = seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", LAZY.format(arguments=arguments)], capture_output=True, text=True, check=False
    )
    assert [name for name in COMMANDS if f"\n  {name} " in done.stdout + done.stderr] == list(COMMANDS)
    assert seconds_of_children() - start < 2


def test_help_loads_no_tensorflow() -> None:
    code = LAZY.format(arguments=["--help"])
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    done = CliRunner().invoke(main, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"Usage: main {name}")


def test_an_unknown_command_is_named() -> None:
    done = CliRunner().invoke(main, ["trian"])
    assert done.exit_code == 2
    assert "No such command 'trian'" in done.output


def test_the_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"gmeta, version {gmeta.__version__}\n"


def test_an_error_of_the_users_is_one_line(failing: list[BaseException]) -> None:
    failing.append(ConfigError("seed: expected a whole number, got 'x'"))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 2
    assert (done.stdout, done.stderr) == ("", "gmeta: error: seed: expected a whole number, got 'x'\n")


def test_debug_keeps_the_traceback(failing: list[BaseException]) -> None:
    failing.append(ConfigError("no"))
    done = CliRunner().invoke(main, ["--debug", "doctor"])
    assert done.exception is failing[0]


def test_a_defect_keeps_its_traceback(failing: list[BaseException]) -> None:
    failing.append(ZeroDivisionError("ours"))
    assert CliRunner().invoke(main, ["doctor"]).exception is failing[0]


def test_an_interrupt_is_one_line_and_130(failing: list[BaseException]) -> None:
    failing.append(KeyboardInterrupt())
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 130
    assert done.stderr == "gmeta: interrupted; finished parts are kept\n"


def test_an_interrupt_that_became_another_error_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("a scope was left half-way")

    monkeypatch.setattr("gmeta.cli.doctor.command", command)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = CliRunner().invoke(main, ["doctor"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 130
    assert done.stderr == "gmeta: interrupted; finished parts are kept\n"


@pytest.mark.parametrize("word", ["--help", "doctor"])
@pytest.mark.shown_by(case="--help")
def test_a_reader_who_has_read_enough_is_no_error(word: str) -> None:
    script = f"from gmeta.cli import main\nmain([{word!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert own_lines(process.stderr.read()) == ""
        assert process.wait() == 1


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gmeta", "--version"], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"gmeta, version {gmeta.__version__}\n"
