"""Real jobs that go wrong: each ends soon, and says which rank and why in its first line."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.monitoring import watch_for_stalls
from gmeta.core.errors import RanksError
from support import warm
from support.process_ranks import run_ranks

pytestmark = pytest.mark.ranks


def steps(fault: str) -> None:
    """Ten steps of an exchange; in the third, rank 1 does something else, and its last thing is a barrier."""
    here = collectives.world()

    @tf.function
    def step(rows: tf.Tensor) -> tf.Tensor:
        return collectives.alltoall(rows, tf.ones([here.size], tf.int32), name="rows")[0]

    for number in range(10):
        if number == 2 and here.rank == 0 and fault in ("hangs", "leaves"):
            watch_for_stalls(here, "2")  # from here on: a slow machine may keep one rank waiting before
        if number == 2 and here.rank == 1:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "raises":
                raise ValueError("bad record in part-7")
            if fault == "hangs":
                time.sleep(600)
            if fault == "leaves":
                return
            if fault == "skips steps":
                collectives.barrier()
        with collectives.name_failures("a step"):
            step(tf.range(here.size))


@pytest.mark.usefixtures("ranks_by")
@pytest.mark.parametrize(
    ("fault", "said", "why"),
    [
        ("killed", "rank 1 of 2 was killed by SIGKILL", "rank 0 of 2 lost its peers during a step"),
        ("raises", "rank 1 of 2 ended with exit code 1", "ValueError: bad record in part-7"),
        ("hangs", "rank 1 of 2 hung", "rank 0 of 2 has waited"),
        # Whether rank 0 misses its peer at once or after a while depends on what that had still to send.
        (
            "leaves",
            "rank 1 of 2 was done while the others",
            "the cause is in its output, not here|has waited",
        ),
        # With Horovod, one would wait in the lane and the other one in Horovod, each for the other.
        ("skips steps", "rank ", r"rank 1 is in alltoall 'barrier' .*, while rank 0 is in alltoall 'rows'"),
    ],
    ids=["killed", "raises", "hangs", "leaves", "skips steps"],
)
@pytest.mark.shown_by(case="gmeta-killed")
def test_a_job_that_fails_names_the_rank_and_ends(fault: str, said: str, why: str) -> None:
    # One that hangs is given up; where a rank ends, the other one is to say so, however late it is.
    with pytest.raises(RanksError) as caught:
        run_ranks(steps, 2, fault, grace=2 if fault == "hangs" else 60)
    report = str(caught.value)
    assert report.startswith(f"the job was ended: {said}")
    assert re.search(why, report)
    # The rank that is left has one line, and no traceback of what it did.
    assert "Traceback" not in report.partition("--- output of rank 0 ---")[2].partition("--- output of")[0]


def test_how_long_ranks_wait_is_said_in_seconds() -> None:
    environment = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "soon"}
    with pytest.raises(RanksError, match="SECONDS='soon': give whole seconds, or 0 for no limit"):
        run_ranks(steps, 2, "none", environment=environment)


@pytest.mark.usefixtures("ranks_by")
@pytest.mark.shown_by(case="gmeta")
def test_ranks_with_another_version_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport gmeta\nfrom gmeta.core.collectives import entry\n"
        "if '1' in (os.environ.get('GMETA_RANK'), os.environ.get('HOROVOD_RANK')):\n"
        "    entry.find_tensorflow = lambda: ('tensorflow', '2.15.0', '')\n"
        "gmeta.init()\n"
    )
    with pytest.raises(RanksError, match=r"alike.*disagree on tensorflow: 2\.15\.0 on rank 1, \S+ on rank 0"):
        run_ranks(script, 2)


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, signal, time\nfrom pathlib import Path\nimport gmeta\n"
        "here = gmeta.init()\nPath(f'pid.{here.rank}').write_text(str(os.getpid()))\n"
        "gmeta.core.collectives.barrier()\n"
        "here.rank or os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)\n"
    )
    module = "gmeta.core.launcher.local_ranks"
    code = f"from {module} import launch; launch([{sys.executable!r}, {str(rank)!r}], 2)"
    job = warm.run([sys.executable, "-c", code], cwd=tmp_path)
    assert job.returncode == -signal.SIGKILL, job.stderr
    for number in range(2):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(int((tmp_path / f"pid.{number}").read_text())).wait(300)
