"""The launcher of elastic jobs: who is started after a loss or when there is room, and when it gives up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gmeta.core.errors import ConfigError, RanksError
from gmeta.core.launcher import elastic_ranks
from gmeta.core.launcher import local_ranks as launch
from gmeta.core.launcher.elastic_ranks import Room, ask_script, launch_elastic
from gmeta.core.launcher.meeting import Host, Values, parse_hosts

# Ranks that are plain Python; `ranks` counts those of all starts.
AS_RANK = """
import os, signal, sys, time
from pathlib import Path
from gmeta.core.collectives.elastic import find_driver
rank, size = (int(os.environ.get(f"GMETA_{n}") or os.environ[f"HOROVOD_{n}"]) for n in ("RANK", "SIZE"))
driver, here = find_driver(), Path(sys.argv[1])
start = os.environ.get("GMETA_STORE") or Path(os.environ["GMETA_NOTES"]).parent.name
name = f"{time.time_ns()}.{start}.{rank}"
(here.parent / name).write_text(f"{size} of {os.environ['GMETA_SHARES']}{os.environ.get('ON', '')}")
(here.parent / name).rename(here / name)
while len(list(here.glob(f"*.{start}.*"))) < size: time.sleep(0.01)
ranks = len(list(here.iterdir()))

def save():
    driver.note_checkpoint()

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def leave_when_told():
    deadline = time.monotonic() + 300
    while not driver.is_change_wanted():
        if time.monotonic() > deadline: sys.exit("nobody told")
        time.sleep(0.01)
    time.sleep(0.2)
    sys.exit(85)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_ranks, "EVERY", 0.05)
    monkeypatch.setattr(launch, "GRACE", 0.5)


def run(folder: Path, code: str, size: int, **options: object) -> list[str]:
    """What was said between starts."""
    said: list[str] = []
    (folder / "starts").mkdir()
    command = [sys.executable, "-c", AS_RANK + code, str(folder / "starts")]
    launch_elastic(command, size, say=said.append, **options)  # type: ignore[arg-type]
    return said


def sizes(folder: Path) -> list[str]:
    """Of each rank that was started, in order: how many there were, of how many shares."""
    return [path.read_text() for path in sorted((folder / "starts").iterdir())]


@pytest.mark.ranks
def test_a_job_goes_on_with_the_ranks_that_are_left_and_then_with_all_again(tmp_path: Path) -> None:
    code = (
        "if size == 3 and ranks <= 3:\n"
        "    save(); rank == 1 and kill(); time.sleep(600)\n"
        "if size == 2: leave_when_told()\n"
    )
    first, second = run(tmp_path, code, 3)
    assert first.startswith("rank 1 of 3 was killed by SIGKILL after ")
    assert first.endswith("; the job goes on with 2 of 3 from the last checkpoint")
    assert second.startswith("there is room for 3 ranks in place of 2; the job goes on with 3 of 3")
    assert sizes(tmp_path) == ["3 of 3"] * 3 + ["2 of 3"] * 2 + ["3 of 3"] * 3


@pytest.mark.ranks
def test_a_script_says_how_many_ranks_there_is_room_for(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.write_text("localhost:1\n")
    code = (
        f"if size == 1: Path({str(slots)!r}).write_text('localhost:1\\n127.0.0.1:7\\n'); leave_when_told()\n"
    )
    (said,) = run(tmp_path, code, 2, script=f"cat {slots}")
    assert said.startswith("there is room for 2 ranks in place of 1")
    assert sizes(tmp_path) == ["1 of 2", "2 of 2", "2 of 2"]


@pytest.mark.ranks
def test_too_few_ranks_end_the_job_and_the_lost_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run(tmp_path, "save(); rank == 1 and kill(); time.sleep(600)\n", 2, min_size=2)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(
        "too few ranks are left, 1 where 2 is the least number: the job was ended: rank 1 of 2 was"
    )
    assert [end.rank for end in caught.value.ends] == [1, 0]


@pytest.mark.ranks
def test_only_the_frozen_rank_is_lost_and_not_those_that_leave_slowly(tmp_path: Path) -> None:
    code = (
        "if size == 4:\n"
        "    save()\n"
        "    if rank == 1: print('rank 1 of 4 lost its peers', file=sys.stderr)\n"
        "    if rank == 2: Path(os.environ['GMETA_NOTES'] + '.lost-peers').touch()\n"
        "    (here.parent / f'ready.{rank}').touch()\n"
        "    while len(list(here.parent.glob('ready.*'))) < 4: time.sleep(0.01)\n"
        "    rank == 0 and sys.exit('gmeta.core.errors.CollectiveError: rank 0 of 4 lost its peers')\n"
        "    time.sleep(600)\n"
    )
    first, *_ = run(tmp_path, code, 4, min_size=3, script="echo localhost:3; echo localhost:1")
    assert first.startswith(
        "rank 3 of 4 hung: the others waited for it in a collective; the job goes on with 3"
    )
    assert sizes(tmp_path)[:7] == ["4 of 4"] * 4 + ["3 of 4"] * 3


@pytest.mark.ranks
@pytest.mark.shown_by("test_too_few_ranks_end_the_job_and_the_lost_one_is_named")
def test_what_fails_again_and_again_before_a_checkpoint_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=r"^3 starts in a row failed before .*: rank 0 of 2 ended with exit"):
        run(tmp_path, "rank == 0 and sys.exit('no row 7'); time.sleep(600)\n", 4)
    # A place that was lost at once isn't tried again while the number of places is the same.
    assert sizes(tmp_path) == ["4 of 4"] * 4 + ["3 of 4"] * 3 + ["2 of 4"] * 2


@pytest.mark.ranks
def test_what_all_ranks_refuse_alike_isnt_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE", 60.0)  # for the second to end by itself, however late it is
    with pytest.raises(RanksError, match=r"^the job was ended: all 2 ranks alike: .*: no such column"):
        run(tmp_path, "sys.exit('no such column')\n", 2)
    assert len(sizes(tmp_path)) == 2


SSH = """#!/bin/sh
ON=" on $1" exec sh -c "$2"
"""


@pytest.mark.ranks
@pytest.mark.shown_by("test_a_job_goes_on_with_the_ranks_that_are_left_and_then_with_all_again")
def test_a_lost_machine_is_left_out_and_another_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    ssh, slots = tmp_path / "ssh", tmp_path / "slots"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    slots.write_text("one:1\ntwo:1\nthree:2\n")
    code = (
        "if size == 4 and ranks <= 4:\n"
        "    save(); rank == 1 and os.killpg(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(600)\n"
        "if size == 3:\n"
        f"    rank or Path({str(slots)!r}).write_text('one:1\\nthree:2\\nfour:1\\n')\n"
        "    leave_when_told()\n"
    )
    hosts = parse_hosts("one:1,two:1")  # the script knows better
    said = run(tmp_path, code, 4, script=f"cat {slots}", hosts=hosts, ssh=[str(ssh)])
    assert said[0].startswith("rank 1 of 4 was lost with two, whose connection ended")
    assert said[0].endswith("; the job goes on with 3 of 4 from the last checkpoint")
    assert said[1:] == [
        "there is room for 4 ranks in place of 3; the job goes on with 4 of 4 from the last checkpoint"
    ]
    found = sizes(tmp_path)
    assert sorted(found[:4]) == [f"4 of 4 on {name}" for name in ("one", "three", "three", "two")]
    assert sorted(found[4:7]) == [f"3 of 4 on {name}" for name in ("one", "three", "three")]
    assert sorted(found[7:]) == [f"4 of 4 on {name}" for name in ("four", "one", "three", "three")]


def room_of(hosts: str, most: int, least: int = 1, script: str | None = None) -> Room:
    return Room(most, least, parse_hosts(hosts), script, Values())


def test_a_place_that_was_lost_before_a_save_is_bad_and_after_one_it_is_free() -> None:
    of = room_of("a:2,b:2", 3)
    assert of.wanted() == ["a", "a", "b"]
    of.lose(["a"], [], saved=False)
    assert of.without(["a", "a", "b"], ["a"]) == ["a", "b"]
    assert of.wanted() == ["a", "b", "b"]
    of.lose(["b"], [], saved=True)
    assert of.wanted() == ["a", "a", "b"]
    of.lose(["a", "a"], ["a"], saved=True)
    assert of.wanted() == ["b", "b"]


def test_fewer_ranks_than_the_least_number_stay_where_they_are() -> None:
    of = room_of("a:1", 3, least=2)
    assert of.without(["a", "b", "c"], ["c"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo localhost:2; echo; echo 127.0.0.1:1", None),
        ("echo localhost", "it printed 'localhost'; each line must be host:slots"),
        ("echo localhost:many", "each line must be host:slots"),
        ("echo gpu7:8", "gpu7 is another machine.*begins with by `gmeta launch --hosts`"),
        ("echo no such file >&2; exit 3", "exit code 3, it said: no such file"),
    ],
)
def test_the_answer_of_a_host_discovery_script(script: str, says: str | None) -> None:
    if says is None:
        assert ask_script(script, elsewhere=False) == [Host("localhost", 3)]
        return
    with pytest.raises(ConfigError, match=says):
        ask_script(script, elsewhere=False)


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 to 2 ranks"):
        launch_elastic(["true"], 2, min_size=3)
    with pytest.raises(
        ConfigError, match="echo localhost:1: room for 1 ranks, fewer than the least number, 2"
    ):
        launch_elastic(["true"], 2, min_size=2, script="echo localhost:1")
