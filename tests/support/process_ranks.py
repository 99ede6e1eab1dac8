"""Runs a function on several real ranks: processes under Horovod on Gloo, on this machine."""

from __future__ import annotations

import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

import gmeta
from gmeta.core.errors import RanksError
from gmeta.core.launcher import local_ranks as launching
from gmeta.core.launcher.local_ranks import launch
from support import warm

_SOURCE = Path(gmeta.__file__).resolve().parents[1]


def run_ranks(
    function_or_script: Callable[..., Any] | Path,
    np: int,
    *args: Any,
    timeout: float = 300.0,
    grace: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a function, or a Python script, on `np` ranks, and return the result of each.

    Each rank is a new process, which has TensorFlow loaded (`support.warm`). The function runs
    after ``gmeta.init()``; a script calls that itself. With ``np=1`` the world is one rank.

    Args:
      function_or_script: A function, sent by value with what it uses of its module, so that a test may define
        it; or the path of a script, whose arguments are `args`.
      np: The number of ranks.
      *args: Arguments, pickled for a function, and as text for a script.
      timeout: Seconds after which all ranks are killed.
      grace: Seconds for the others to end by themselves when one has failed: more than the launcher's, since
        a busy machine may delay a rank's message.
      environment: Variables in addition to this process's environment.

    Returns:
      By rank, the function's result; for a script, the text that it wrote to stdout.

    Raises:
      RanksError: A rank failed or time ran out; the message has the cause, then the whole output of each
        rank.

    Example:
      >>> run_ranks(lambda: gmeta.core.collectives.world().rank, 2)  # doctest: +SKIP
      [0, 1]
    """
    with tempfile.TemporaryDirectory() as folder:
        command = rank_command(function_or_script, args, Path(folder))
        job = command, np, timeout, ranks_environment(environment), grace
        said, error, ends = warm.call(_launch, *job, timeout=timeout + 300)
        if error:
            raise RanksError(error, ends=ends)
        if not callable(function_or_script):
            return ["\n".join(lines) for lines in said]
        return results(Path(folder), np)


def rank_command(
    function_or_script: Callable[..., Any] | Path, args: tuple[Any, ...], folder: Path
) -> list[str]:
    """Make the command of each rank; a function and its results are stored in `folder`."""
    if not callable(function_or_script):
        return [sys.executable, str(function_or_script), *map(str, args)]
    _send(function_or_script, args, folder)
    return [sys.executable, "-m", __name__, str(folder)]


def results(folder: Path, np: int) -> list[Any]:
    """Read by rank the results of the function of `rank_command`."""
    return [pickle.loads((folder / f"result.{rank}").read_bytes()) for rank in range(np)]


def ranks_environment(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables of a test's ranks in addition to this process's environment."""
    paths = os.pathsep.join([str(_SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Ranks outnumber the cores here: polling for messages every 0.1 ms takes a fifth of their time.
    return {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "2", "HOROVOD_CYCLE_TIME": "1", **(given or {})}


def _launch(
    command: list[str], np: int, timeout: float, environment: dict[str, str], grace: float
) -> tuple[list[list[str]], str, tuple[Any, ...]]:
    """Return the lines of stdout by rank, what failed, and how the ranks ended."""
    output: list[list[str]] = [[] for _ in range(np)]
    said: list[list[str]] = [[] for _ in range(np)]

    def write(rank: int, stream: str, line: str) -> None:
        output[rank].append(line)
        if stream == "stdout":
            said[rank].append(line)

    launching.GRACE = grace  # of this process, which serves only these ranks
    try:
        launch(command, np, environment=environment, write=write, timeout=timeout)
    except RanksError as error:
        whole = "".join(f"\n--- output of rank {r} ---\n" + "\n".join(o) for r, o in enumerate(output))
        return said, f"{error}{whole}", error.ends
    return said, "", ()


def _send(function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> None:
    module = sys.modules.get(function.__module__)
    by_value = module is not None and not function.__module__.startswith("gmeta.")
    if by_value:  # a test module can't be imported by its name
        cloudpickle.register_pickle_by_value(module)
    try:
        (folder / "function").write_bytes(cloudpickle.dumps((function, args)))
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _main(folder: Path) -> None:
    """One rank: read the function, run it, write its result."""
    world = gmeta.init()
    function, args = pickle.loads((folder / "function").read_bytes())
    result = function(*args)
    unfinished = folder / f"unfinished.{world.rank}"
    unfinished.write_bytes(cloudpickle.dumps(result))
    unfinished.rename(folder / f"result.{world.rank}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))


# A process's stderr without what TensorFlow writes there during its import.


# Newer TensorFlow versions log through absl, which prints earlier messages, of oneDNN and CUDA, at any
# TF_CPP_MIN_LOG_LEVEL. Silencing it would also silence later messages of users.
_STARTUP = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR\n"
    r"|[IWE]\d{4} [\d:.]+ +\d+ (port|cudart_stub|cuda_\w+|computation_placer)\.cc:\d+\] .*\n"
)


def own_lines(stderr: str) -> str:
    """Return the lines without those of TensorFlow's start."""
    return _STARTUP.sub("", stderr)


# Lines that are about the machine, not about the process.

_SLOW = re.compile(r"WARNING:tensorflow:Callback method .* is slow compared to the batch time.*\n")


def without_stalls(output: str) -> str:
    r"""Return output without Keras' warnings of a machine that paused in the first batches of a fit.

    Keras compares the time in callbacks' hooks with that of batches, so a pause of the machine in a hook is
    reported as a slow callback.

    Example:
      >>> without_stalls("WARNING:tensorflow:Callback method `f` is slow compared to the batch time (1s).\n")
      ''
    """
    return _SLOW.sub("", output)
