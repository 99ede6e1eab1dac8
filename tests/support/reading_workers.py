"""Workers that read, as threads of this process and as separate processes, for tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gmeta.io.service.worker import WorkerServer, key_of


@contextmanager
def worker_thread(folder: Path) -> Iterator[WorkerServer]:
    """Run a worker in this process, which announces itself; ``close`` ends it like a kill."""
    server = WorkerServer("127.0.0.1", 0, key_of(folder), folder)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


class WorkerProcess:
    """A worker started by the command line."""

    def __init__(self, folder: Path, *options: str) -> None:
        words = [sys.executable, "-m", "gmeta", "workers", str(folder), "--host", "127.0.0.1", *options]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def address(self) -> str:
        """Wait until it listens, and return its address."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()[3].rstrip(",")

    def kill(self) -> None:
        """End it as a kernel that is out of memory does."""
        self.process.kill()
        self.process.wait()

    def interrupt(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        """Send it a signal, and return its exit code and its remaining output."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err
