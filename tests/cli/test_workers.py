"""`gmeta workers`: processes that are killed, interrupted, started and sent away while others train."""

import signal
import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import ConfigError
from support import warm
from support.reading_workers import WorkerProcess

COUNT = 60


def numbers(start):
    """An epoch of numbers, a few milliseconds each."""
    import tensorflow as tf

    begin, end = start.part_of(COUNT)
    k = np.arange(min(begin + start.taken, end), end)

    def slow(number):
        return tf.numpy_function(lambda one: (time.sleep(0.01), one)[1], [number], tf.int64)

    return tf.data.Dataset.from_tensor_slices(k).map(slow).map(lambda one: tf.ensure_shape(one, []))


def in_turn(pieces):
    """The order in which training takes the elements of pieces that are all read at once."""
    return [k * COUNT // pieces + step for step in range(COUNT // pieces) for k in range(pieces)]


def kill_one(folder):
    """In a warm process: two workers read, and one is killed in the middle of its pieces."""
    workers = [WorkerProcess(folder) for _ in range(2)]
    addresses = [worker.address() for worker in workers]
    from gmeta.io import distribute
    from gmeta.io.service.pieces import ServedPosition

    served = iter(distribute(numbers, folder, position=ServedPosition(4), ahead=1))
    found = [int(next(served)) for _ in range(9)]
    workers[0].kill()
    found += [int(number) for number in served]
    return addresses, found, workers[1].interrupt()


def scale(folder):
    """In a warm process: a pool adds a worker while training waits, and replaces one that was killed."""
    import os

    from gmeta.io import ScaledPool, distribute
    from gmeta.io.service.pieces import ServedPosition

    pool = ScaledPool(1, 2, folder=folder, interval=0.5)
    first = pool._started[0].process
    served = distribute(numbers, pool, position=ServedPosition(4), ahead=1)
    epochs, started = [], [first.pid]
    killed = False
    until = time.monotonic() + 100
    while time.monotonic() < until and len(started) < 3:
        epochs.append([int(number) for number in served])
        started += [one.process.pid for one in pool._started if one.process.pid not in started]
        if len(pool.ready()) == 2 and not killed:
            os.kill(first.pid, signal.SIGKILL)
            killed = True
    pool.close()
    return (
        epochs,
        len(started),
        [one.process.poll() for one in pool._started],
        sorted(path.name for path in Path(folder).iterdir()),
    )


SUBMIT = """
import os, sys
from pathlib import Path

if os.fork():
    os._exit(0)  # as a command that gives the work to a cluster
Path(sys.argv[1], f"{os.getpid()}.pid").touch()
from gmeta.cli import main
main(["workers", sys.argv[2], "--host", "127.0.0.1"])
"""


def submit(folder):
    """In a warm process: a pool starts by a command that ends at once, sends away, replaces and closes."""
    import os

    from gmeta.io import ScaledPool, distribute
    from gmeta.io.readers.read_options import Waiting
    from gmeta.io.service.pieces import ServedPosition

    script, until = Path(folder, "submit.py"), time.monotonic() + 100
    script.write_text(SUBMIT)
    command = f"{sys.executable} {script} {folder} {{folder}}"
    pool = ScaledPool(1, 2, folder=f"{folder}/workers", command=command, interval=0.2)
    served = distribute(numbers, pool, position=ServedPosition(4), ahead=1)
    epochs, counts = [], []

    def read():
        epochs.append([int(number) for number in served])

    def workers():
        pids = [int(path.stem) for path in Path(folder).glob("*.pid")]
        return [pid for pid in pids if is_running(pid)]

    def wait(count, work):
        while len(workers()) != count or len(pool.ready()) != count:
            work()
            if time.monotonic() > until:
                break
        counts.append(len(workers()))

    def idle():
        time.sleep(0.05)
        pool.note(Waiting(), 0.0, 4)

    wait(2, read)
    wait(1, idle)
    os.kill(workers()[0], signal.SIGKILL)
    read()  # which another one makes possible
    wait(1, idle)
    pool.close()
    while workers() and time.monotonic() < until:
        time.sleep(0.05)
    return epochs, [*counts, len(workers())]


def is_running(process):
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def test_a_worker_that_is_killed_costs_no_element_and_ctrl_c_ends_the_other(tmp_path):
    addresses, found, (code, out, err) = warm.call(by_value(kill_one), str(tmp_path), timeout=120)
    assert found == in_turn(4)
    assert code == 0, err
    assert "Traceback" not in err
    assert "ended; " in out
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2  # the killed one couldn't take its announcement back
    assert left[0].startswith(addresses[0].replace(":", "-"))


@pytest.mark.shown_by("test_a_worker_that_is_killed_costs_no_element_and_ctrl_c_ends_the_other")
def test_a_pool_adds_workers_while_training_waits_and_replaces_lost_ones(tmp_path):
    epochs, started, ends, left = warm.call(by_value(scale), str(tmp_path), timeout=200)
    assert all(epoch == in_turn(4) for epoch in epochs)
    assert started == 3
    assert None not in ends
    assert [name for name in left if name.endswith(".worker")].__len__() <= 1  # that of the killed one


@pytest.mark.shown_by("test_a_worker_that_is_killed_costs_no_element_and_ctrl_c_ends_the_other")
def test_a_command_starts_workers_that_the_pool_sends_away_replaces_and_ends(tmp_path):
    epochs, counts = warm.call(by_value(submit), str(tmp_path), timeout=200)
    assert all(epoch == in_turn(4) for epoch in epochs)
    assert counts == [2, 1, 1, 0]


def test_a_command_that_there_is_not_is_said(tmp_path):
    from gmeta.io import ScaledPool

    with pytest.raises(ConfigError, match="can't run 'srnu', which command= begins with: No such file"):
        ScaledPool(folder=tmp_path, command="srnu -N1 gmeta workers {folder}")


def by_value(function):
    """Let a function of this module travel to a process that doesn't know the module."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return function


def test_what_can_not_be_is_one_line(monkeypatch, tmp_path):
    monkeypatch.delenv("GMETA_WORKERS_KEY", raising=False)
    for words, expected in (
        (["workers"], "GMETA_WORKERS_KEY isn't set"),
        (["workers", str(tmp_path), "--host", "203.0.113.1"], "can't listen at 203.0.113.1:0: "),
    ):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2
        assert expected in done.output
        assert done.output.count("\n") == 1


def test_a_worker_ends_when_nobody_reads(tmp_path):
    pytest.importorskip("tensorflow")
    done = warm.run(
        [sys.executable, "-m", "gmeta", "workers", tmp_path, "--host", "127.0.0.1", "--idle", "0.3"]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a worker at 127.0.0.1:")
    assert "ended; 0 pieces begun, 0 elements sent" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def read_by_name(folder):
    """In a warm process: the function is of a module that only a folder of the user's has."""
    from gmeta.io import distribute
    from gmeta.io.service.pieces import ServedPosition

    modules = Path(folder, "modules")
    modules.mkdir()
    (modules / "rows_of_the_user.py").write_text(
        "import tensorflow as tf\n"
        "def numbers(start):\n"
        "    begin, end = start.part_of(9)\n"
        "    return tf.data.Dataset.range(begin + start.taken, end)\n"
    )
    sys.path.append(str(modules))
    worker = WorkerProcess(f"{folder}/workers", "--path", str(modules))
    worker.address()
    import rows_of_the_user

    served = distribute(rows_of_the_user.numbers, f"{folder}/workers", position=ServedPosition(1))
    return [int(number) for number in served], worker.interrupt()[0]


def test_a_worker_finds_the_functions_modules_in_a_folder_that_is_named(tmp_path):
    found, code = warm.call(by_value(read_by_name), str(tmp_path), timeout=120)
    assert (found, code) == (list(range(9)), 0)
