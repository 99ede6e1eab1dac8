"""Runs Python programs that begin with TensorFlow loaded: forks of a server that has imported it.

Tests start some hundred processes, and importing TensorFlow takes each 4 CPU seconds. The server has run
nothing of TensorFlow, so a fork of it equals a process after its imports. It is a process like any other,
with its own id, signals, output and exit code. Python programs that it starts, such as ranks, are forks too,
until it has run TensorFlow.

Tests of imports, AutoGraph or a fresh interpreter need `subprocess` itself.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

_IMPORTED = ("tensorflow", "tf_keras", "horovod.tensorflow", "gmeta.models", "gmeta.experiment.runs.all_runs")


def run(
    command: Sequence[object],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 900.0,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program as `subprocess.run` with ``capture_output`` and ``text`` does, but warm.

    Args:
      command: ``sys.executable``, then ``-m MODULE``, ``-c CODE`` or a script, and arguments.
      cwd: Its working folder; this process's by default.
      env: Its whole environment; this process's by default.
      timeout: Seconds after which it is killed.

    Raises:
      subprocess.TimeoutExpired: It was killed.
    """
    words = [str(word) for word in command]
    with tempfile.TemporaryDirectory() as folder:
        request = words, str(cwd or Path.cwd()), dict(os.environ if env is None else env), folder, timeout
        server = _server()
        server.send(request)
        code = server.recv()
        out, err = ((Path(folder) / name).read_text(errors="replace") for name in ("out", "err"))
    if code is None:
        raise subprocess.TimeoutExpired(words, timeout, out, err)
    return subprocess.CompletedProcess(words, code, out, err)


def call(function: Callable[..., Any], *args: Any, timeout: float = 900.0) -> Any:
    """Call a function of gmeta in a warm process, with arguments that pickle, and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((function, args)))
        done = run([sys.executable, "-m", __name__, folder], timeout=timeout)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}:\n{done.stdout}{done.stderr}")
        return pickle.loads(Path(folder, "result").read_bytes())


@functools.cache
def _server() -> _Pair:
    """This process's server; it ends when its pipe is closed, at the latest when this process ends."""
    ours, theirs = (os.pipe() for _ in range(2))
    code = f"from {__name__} import _serve; _serve({theirs[0]}, {ours[1]})"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    server = subprocess.Popen([sys.executable, "-c", code], pass_fds=(theirs[0], ours[1]), env=environment)
    os.close(theirs[0])
    os.close(ours[1])
    pair = _Pair(Connection(ours[0], writable=False), Connection(theirs[1], readable=False))
    atexit.register(pair.end, server)
    return pair


class _Pair:
    """A pipe each way."""

    def __init__(self, reads: Connection, writes: Connection) -> None:
        self.recv, self.send, self._writes = reads.recv, writes.send, writes

    def end(self, server: subprocess.Popen[bytes]) -> None:
        """The server finds its pipe closed."""
        self._writes.close()
        server.wait()


def _serve(reads: int, writes: int) -> None:
    """The server: for each request a fork, one after another."""
    import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2

    for name in _IMPORTED:
        if importlib.util.find_spec(name.split(".")[0]) is not None:  # Horovod may be absent
            importlib.import_module(name)

    tune_no_datasets()
    gc.collect()
    gc.freeze()  # as in `tests/conftest.py`: no fork scans what was imported, or copies its pages
    subprocess.Popen = _Forked  # type: ignore[misc]
    requests, answers = Connection(reads, writable=False), Connection(writes, readable=False)
    while True:
        try:
            words, cwd, env, folder, timeout = requests.recv()
        except (EOFError, KeyboardInterrupt):
            return
        with Path(folder, "out").open("w") as out, Path(folder, "err").open("w") as err:
            process = subprocess.Popen(
                words,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        answers.send(code)


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """Forks for a program of this Python; starts any other as usual, and all once TensorFlow has run."""

    # Popen passes all by position; the arguments read here have the same position in every supported Python.
    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = [] if isinstance(args, (str, bytes, os.PathLike)) else [os.fsdecode(word) for word in args]
        ours = words[:1] == [sys.executable] and len(words) > 1
        if not ours or (words[1].startswith("-") and words[1] not in ("-c", "-m")) or _has_run():
            return super()._execute_child(args, *rest)  # type: ignore[misc]
        cwd, env = rest[4], rest[5]
        (p2cread, _, _, c2pwrite, _, errwrite), new_session = rest[9:15], rest[20]
        self.pid = os.fork()
        if self.pid == 0:
            _become(words[1:], cwd, env, (p2cread, c2pwrite, errwrite), new_session)
        self._child_created = True
        self._close_pipe_fds(*rest[9:15])  # type: ignore[attr-defined]
        return None


def _has_run() -> bool:
    """Whether TensorFlow has threads here, which a fork would lack and wait for."""
    context = importlib.import_module("tensorflow.python.eager.context")
    return context._context is not None and context._context._initialized


def _become(
    words: list[str], cwd: Any, env: Mapping[str, str] | None, streams: Sequence[int], new_session: bool
) -> NoReturn:
    """In the fork: be the program, from its environment to its exit code."""
    code: Any = 1
    try:
        if new_session:
            os.setsid()
        for to, descriptor in enumerate(streams):
            if descriptor != -1:
                os.dup2(descriptor, to)
        # Pipes of its siblings, whose readers wait until all ends are closed.
        os.closerange(3, 1 + max(int(path.name) for path in Path("/proc/self/fd").iterdir()))
        for number, handler in (
            (signal.SIGINT, signal.default_int_handler),
            (signal.SIGTERM, signal.SIG_DFL),
        ):
            signal.signal(number, handler)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:0] = [path for path in paths if path not in sys.path]
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the parent's temporary folders
        code = _run(words)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _run(words: list[str]) -> int:
    """Run a program to its end, and return its exit code."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, str(Path.cwd()))
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0


if __name__ == "__main__":
    function, args = pickle.loads(Path(sys.argv[1], "call").read_bytes())
    Path(sys.argv[1], "result").write_bytes(cloudpickle.dumps(function(*args)))


# Makes iterators of data sets end at once in tests.
#
# TensorFlow 2.16 doesn't wake the thread that tunes a pipeline when an iterator ends before its data, so that
# the iterator's end waits as long as the iterator has lived (`gmeta.io.readers.group_reader.settle`). The
# garbage collector then stops a process of many tests for up to 40 s at a time.


def tune_no_datasets() -> None:
    """From now on, in this process, iterate over data sets without tuning unless they request it."""
    settle = dataset_ops.DatasetV2._apply_debug_options

    def settle_untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
        settled = settle(dataset)
        if settled.options().autotune.enabled is not None:
            return settled
        options = tf.data.Options()
        options.autotune.enabled = False
        return settled.with_options(options)

    dataset_ops.DatasetV2._apply_debug_options = settle_untuned
