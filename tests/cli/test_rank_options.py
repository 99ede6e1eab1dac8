"""`gmeta launch` and the options of elastic jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.cli import rank_options as ranks
from gmeta.core.launcher.meeting import Host

ELASTIC = ["--elastic", "--min-np", "2", "--host-discovery-script", "./hosts"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...], int, dict[str, Any]]]:
    """What was launched in place of ranks."""
    found: list[tuple[str, tuple[str, ...], int, dict[str, Any]]] = []
    for name in ("launch", "launch_elastic"):

        def launch(command: Sequence[str], size: int, name: str = name, **options: Any) -> None:
            found.append((name, tuple(command), size, options))

        monkeypatch.setattr(ranks, name, launch)
    return found


def test_a_users_program_keeps_its_own_options(launched: list[Any]) -> None:
    for dashes in ([], ["--"]):
        words = ["launch", "--np", "3", *dashes, "python", "train.py", "--elastic", "--np", "5"]
        assert CliRunner().invoke(main, words).exit_code == 0
    program = ("python", "train.py", "--elastic", "--np", "5")
    assert launched == [("launch", program, 3, {"write": None})] * 2


def test_elastic_jobs_are_launched_as_the_options_say(launched: list[Any]) -> None:
    assert CliRunner().invoke(main, ["launch", "--np", "4", *ELASTIC, "true"]).exit_code == 0
    assert CliRunner().invoke(main, ["train", "--run", "x", "--np", "1", "--elastic"]).exit_code == 0
    assert launched[0] == (
        "launch_elastic",
        ("true",),
        4,
        {"min_size": 2, "script": "./hosts", "write": None},
    )
    name, _, size, options = launched[1]
    assert (name, size, options) == ("launch_elastic", 1, {"min_size": 1, "script": None, "write": None})


def test_elastic_jobs_over_hosts_begin_with_as_many_ranks_as_these_have_room_for(launched: list[Any]) -> None:
    words = ["launch", "--hosts", "a:2,b:2", "--ssh", "rsh", *ELASTIC, "true"]
    assert CliRunner().invoke(main, words).exit_code == 0
    hosts = {"hosts": [Host("a", 2), Host("b", 2)], "ssh": ("rsh",)}
    options = {"min_size": 2, "script": "./hosts", "write": None, **hosts}
    assert launched == [("launch_elastic", ("true",), 4, options)]


def test_ranks_on_hosts_are_as_many_as_these_have_room_for(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GMETA_SSH", "ssh -p 22")
    for more in ([], ["--np", "3", "--ssh", "rsh"]):
        assert CliRunner().invoke(main, ["launch", "--hosts", "a:2,b:2", *more, "true"]).exit_code == 0
    hosts = [Host("a", 2), Host("b", 2)]
    assert launched == [
        ("launch", ("true",), 4, {"write": None, "hosts": hosts, "ssh": ("ssh", "-p", "22")}),
        ("launch", ("true",), 3, {"write": None, "hosts": hosts, "ssh": ("rsh",)}),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launch", "--np", "2", "--min-np", "1", "true"], "--min-np 1 defines how an elastic job varies"),
        (["train", "--run", "x", "--host-discovery-script", "y"], "--host-discovery-script y defines how"),
        (["train", "--run", "x", "--elastic"], "--elastic needs --np"),
        (["launch", "true"], "give --np, the number of ranks, or --hosts"),
        (["launch", "--np", "2", "--ssh", "ssh", "true"], "--ssh 'ssh' is for other machines"),
        (["launch", "--hosts", "a,b", "true"], "'a' is no host:slots"),
    ],
)
def test_options_that_need_others_are_refused(words: list[str], says: str, launched: list[Any]) -> None:
    said = CliRunner().invoke(main, words)
    assert (said.exit_code, launched) == (2, [])
    assert says in said.stderr


def test_ranks_start_no_ranks(monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    said = CliRunner().invoke(main, ["launch", "--np", "2", "true"])
    assert (said.exit_code, launched) == (2, [])
    assert "one of 3 ranks already" in said.stderr


@pytest.mark.parametrize("words", [["launch", "--np", "2", "true"], ["train", "--np", "2"], ["evaluate"]])
def test_a_command_that_several_processes_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, launched: list[Any], words: list[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert "one of 2 by srun (SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1)" in done.output
    assert launched == []
