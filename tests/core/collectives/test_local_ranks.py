"""The launcher of ranks: who is told what, what a failure's report says, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gmeta.core.collectives import place
from gmeta.core.collectives.rendezvous import LEAVES, LOST_PEERS
from gmeta.core.errors import ConfigError, RanksError
from gmeta.core.launcher import local_ranks as module
from gmeta.core.launcher.local_ranks import RankEnd, launch, report, verdict
from gmeta.core.launcher.meeting import Host, parse_hosts
from gmeta.core.launcher.rank_processes import module_command

# Ranks that are plain Python: they read who they are, and do one thing.
AS_RANK = """
import os, signal, sys, time
rank, size = (int(os.environ.get(f"GMETA_{n}") or os.environ[f"HOROVOD_{n}"]) for n in ("RANK", "SIZE"))
"""


def ranks(code: str) -> list[str]:
    return [sys.executable, "-c", AS_RANK + code]


def failure(code: str, size: int = 2, **options: object) -> RanksError:
    with pytest.raises(RanksError) as caught:
        launch(ranks(code), size, **options)  # type: ignore[arg-type]
    return caught.value


SHADOWS = ("secrets", "json", "socket", "tempfile", "http", "numpy", "gmeta")


@pytest.fixture
def shadows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, whose modules have the names of others."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise ImportError('a module of the user')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.ranks
@pytest.mark.parametrize("paths", ["", "."])
def test_a_helper_on_another_machine_imports_nothing_from_the_users_folder(
    shadows: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], paths: str
) -> None:
    """And the user's program does."""
    ssh = shadows / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$1"\n')
    ssh.chmod(0o755)
    (shadows / "src").mkdir()
    (shadows / "src" / "secrets.py").write_text("MINE = 'the module of the user'")
    (shadows / "src" / "train.py").write_text(
        f"{AS_RANK}import secrets\nprint(secrets.MINE, os.environ['PYTHONPATH'] or 'nowhere', rank)"
    )
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    monkeypatch.setenv("PYTHONPATH", paths)
    launch([sys.executable, "src/train.py"], 2, hosts=parse_hosts("far:1,away:1"), ssh=[str(ssh)])
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"[{rank}] the module of the user {paths or 'nowhere'} {rank}" for rank in range(2)
    ]


def test_the_command_of_a_module_of_gmetas_imports_nothing_from_the_users_folder(shadows: Path) -> None:
    done = subprocess.run(module_command("gmeta", "--version"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "gmeta,"), done.stderr
    code = "import sys; print(sys.argv[1:], sys.path[-2:])"
    (shadows / "elsewhere").mkdir()
    (shadows / "elsewhere" / "shows.py").write_text(code)
    done = subprocess.run(
        module_command("shows", "a b", "-c", paths=[str(shadows / "elsewhere")]),
        capture_output=True,
        text=True,
        check=False,
    )
    root = str(Path(module.__file__).parents[3])
    assert done.stdout == f"{['a b', '-c']} {[root, str(shadows / 'elsewhere')]}\n", done.stderr


@pytest.mark.usefixtures("ranks_by")
@pytest.mark.ranks
def test_ranks_know_who_they_are_and_their_lines_are_marked(capfd: pytest.CaptureFixture[str]) -> None:
    code = "print('one of', size); print('x\\ry', end='', file=sys.stderr)"
    launch(ranks(code), 3)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] one of 3", "[1] one of 3", "[2] one of 3"]
    assert sorted(err.splitlines()) == sorted(f"[{rank}] {text}" for rank in range(3) for text in "xy")


@pytest.mark.ranks
def test_a_failure_ends_the_others_and_is_reported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.5)
    error = failure("rank == 1 and sys.exit('no such file'); time.sleep(600)")
    assert (
        str(error).splitlines()[0].startswith("the job was ended: rank 1 of 2 ended with exit code 1 after")
    )
    assert str(error).splitlines()[0].endswith("s: no such file")
    assert "  no such file" in str(error).splitlines()[:4]
    assert "rank 0 was killed by SIGTERM by the launcher" in str(error)
    assert [end.ended_here for end in error.ends] == [False, True]


@pytest.mark.usefixtures("ranks_by")
@pytest.mark.ranks
@pytest.mark.shown_by(case="gmeta")
def test_a_signal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.5)
    error = failure("rank == 2 and os.kill(os.getpid(), signal.SIGKILL); time.sleep(600)", size=3)
    assert str(error).startswith("the job was ended: rank 2 of 3 was killed by SIGKILL")


# `cat` stands for the connection, which may end while what it has started goes on.
SSH = """#!/bin/sh
cd "$(dirname "$0")" && mkfifo "wire.$1" && exec 3<&0
cat <&3 >"wire.$1" & echo $! >"connection.$1"
exec sh -c "$2" <"wire.$1"
"""


@pytest.mark.ranks
def test_a_rank_whose_connection_ends_is_lost_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    monkeypatch.setattr(module, "GRACE", 0.5)
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    connection = f"int(open({str(tmp_path / 'connection.two')!r}).read())"
    code = f"rank == 1 and os.kill({connection}, signal.SIGKILL); time.sleep(600)"
    error = failure(code, hosts=parse_hosts("one:1,two:1"), ssh=[str(ssh)])
    said = "the job was ended: rank 1 of 2 was lost with two, whose connection ended with exit code 143"
    assert str(error).startswith(said)


@pytest.mark.ranks
def test_a_rank_that_ignores_the_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.5)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ranks have it from here, however late they start
    try:
        error = failure("time.sleep(600)", timeout=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert str(error).startswith("the job was ended: ranks 0, 1 of 2 had not ended after 2 s")
    assert {end.code for end in error.ends} == {-signal.SIGKILL}


def end_of(rank: int, code: int, *tail: str, ended_here: bool = False, told: str = "") -> RankEnd:
    return RankEnd(rank, code, 7.0, ended_here, tail, frozenset(filter(None, [told])))


UNLIKE = "the ranks make different collectives: rank 0 is in allreduce 'dense'; look for `if rank == 0`"
WAITED = "rank 1 of 2 has waited 60 s in barrier"
LATE = "rank 0 of 2 lost its peers during fit: timed out: rank 1 did not come within 60 s to alltoall 'keys'"
LOST = "gmeta.core.errors.CollectiveError: rank 0 of 2 lost its peers"

# Ranks that the launcher has ended: two had said that others were gone and one left, and one said nothing.
SLOW = end_of(1, -15, LOST, ended_here=True)
NOTES = end_of(2, -15, "its traceback comes last", ended_here=True, told=LOST_PEERS)
LEAVING = end_of(2, -15, ended_here=True, told=LEAVES)
FROZEN = end_of(
    3, -9, "gloo/transport/tcp/pair.cc:589] Read error: Connection reset by peer", ended_here=True
)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        # Rank 0 was the first to leave, but of what rank 1 had done.
        ([end_of(0, 1, LOST), end_of(1, 2, "gmeta: error: x")], "rank 1 of 2 ended with exit code 2"),
        ([end_of(0, 2, "gmeta: error: y"), end_of(1, 2, "gmeta: error: y")], "all 2 ranks alike"),
        ([end_of(0, 75, LOST), end_of(1, -15, ended_here=True)], "rank 1 of 2 hung"),
        ([end_of(0, 75, LOST), SLOW, NOTES, FROZEN], "rank 3 of 4 hung: the others waited for it"),
        ([end_of(0, 85, told=LEAVES), SLOW, end_of(2, -15, ended_here=True), FROZEN], "ranks 2, 3 of 4 hung"),
        ([end_of(0, 75, LOST), SLOW], "rank 0 of 2 ended with exit code 75"),
        ([end_of(0, 85, "a code of the program's own"), end_of(1, 0)], "rank 0 of 2 ended with exit code 85"),
        ([end_of(1, 0), end_of(0, 1, LOST)], "rank 1 of 2 was done while the others"),
        ([end_of(0, 1, LOST), end_of(1, 1, LOST)], "rank 0 of 2 ended with exit code 1 after 7 s"),
        (
            [end_of(rank, 1, f"gmeta: error: rank {rank} of 2 during a step: {UNLIKE}") for rank in (1, 0)],
            f"rank 1 of 2 during a step: {UNLIKE.split(';')[0]}",
        ),
        (
            [end_of(1, 75, f"gmeta: error: {WAITED} for ranks"), end_of(0, 1, f"{LATE}; another rank")],
            f"the ranks waited for each other: {WAITED}; {LATE}",
        ),
    ],
)
def test_the_cause_is_told_from_its_consequences(ends: list[RankEnd], said: str) -> None:
    assert report(ends).startswith(f"the job was ended: {said}")


@pytest.mark.parametrize(
    ("ends", "lost", "hopeless"),
    [
        ([end_of(0, 1, LOST), end_of(1, -9), end_of(2, -9)], [1, 2], False),
        ([end_of(0, 75, LOST), end_of(2, 75, LOST), end_of(1, -15, ended_here=True)], [1], False),
        ([end_of(0, 75, LOST), SLOW, NOTES, FROZEN], [3], False),
        ([end_of(0, 75, LOST), SLOW, LEAVING, FROZEN], [3], False),
        ([end_of(0, 75, LOST), SLOW], [], False),
        # Rank 0 was to start again with others, and both others failed alike: not all did.
        (
            [end_of(0, 85, told=LEAVES), end_of(1, 2, "gmeta: error: y"), end_of(2, 2, "gmeta: error: y")],
            [1, 2],
            False,
        ),
        ([end_of(0, 1, LOST), end_of(1, 1, LOST)], [], False),
        ([end_of(0, 2, "gmeta: error: y"), end_of(1, 2, "gmeta: error: y")], [], True),
        ([end_of(1, 0), end_of(0, 1, LOST)], [], True),
    ],
)
def test_ranks_that_failed_by_themselves_are_lost(
    ends: list[RankEnd], lost: list[int], hopeless: bool
) -> None:
    found = verdict(ends)
    assert ([end.rank for end in found.lost], found.hopeless) == (lost, hopeless)


@pytest.mark.usefixtures("ranks_by")
@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.shown_by(case="gmeta-2")
def test_an_interrupted_launcher_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import signal, sys\nfrom gmeta.core.launcher.local_ranks import launch\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"launch({ranks('print(os.getpid()); time.sleep(600)')!r}, 2)\n"
    )
    job = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    pids = [int(job.stdout.readline().split()[1]) for _ in range(2)]
    os.kill(job.pid, number)
    job.communicate(timeout=300)
    assert job.returncode != 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_cannot_be_launched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="0 is no number of ranks"):
        launch(["true"], 0)
    monkeypatch.setattr(place, "horovod_version", lambda: "0.28.1")
    with pytest.raises(ConfigError, match="GMETA_RANKS=horovod, but several hosts are given"):
        launch(["true"], 2, environment={"GMETA_RANKS": "horovod"}, hosts=[Host("a", 2)])
    monkeypatch.setattr(place, "horovod_version", lambda: None)
    with pytest.raises(ConfigError, match="GMETA_RANKS=horovod, but Horovod is not installed"):
        launch(["true"], 2, environment={"GMETA_RANKS": "horovod"})
    with pytest.raises(ConfigError, match="GMETA_RANKS='mpi': give one of auto, horovod, gmeta"):
        launch(["true"], 2, environment={"GMETA_RANKS": "mpi"})
    monkeypatch.setenv("GMETA_RANKS", "gmeta")
    with pytest.raises(ConfigError, match="GMETA_RANKS=gmeta, but a launcher of Horovod's or MPI's started"):
        place.check_launcher(own=False)
