"""Starts a module of this folder as the ranks of a job, with settings, and reads what rank 0 wrote."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gmeta.core.launcher.local_ranks import launch
from support.hosts import rack, start_ranks, wait_for_ranks

SOCKET = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
"""The variables that make NCCL use only sockets."""

_BENCH = Path(__file__).resolve().parents[1]


def run_job(
    module: str,
    ranks: int,
    settings: Mapping[str, Any],
    out: Path,
    environment: Mapping[str, str] | None = None,
    gbit: float | None = None,
    timeout: float = 3600,
) -> Any:
    """Run ``parts.<module>`` on several ranks.

    Args:
      module: The module, whose main reads its arguments by `job_arguments`.
      ranks: The number of ranks.
      settings: Values that JSON can hold.
      out: The file that rank 0 writes.
      environment: Variables in addition to this process's environment.
      gbit: If given, each rank has its own machine, in a rack whose wires carry this many 10^9 bits a second
        (`support.hosts`).
      timeout: Seconds after which the job is ended.

    Returns:
      The file's content, from JSON.

    Raises:
      RanksError: A rank failed, or time ran out.
    """
    paths = [str(_BENCH), str(_BENCH.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared = {"PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", f"parts.{module}", str(out), json.dumps(settings)]
    variables = {**shared, **(environment or {})}
    if gbit is not None:
        with rack(ranks, gbit) as machines:
            wait_for_ranks(machines, start_ranks(machines, command, environment=variables), timeout=timeout)
        return json.loads(out.read_text())
    # A rank's output is TensorFlow's logging; if a rank fails, the error has the last lines.
    launch(command, ranks, environment=variables, write=lambda *_: None, timeout=timeout)
    return json.loads(out.read_text())


def job_arguments() -> tuple[Path, dict[str, Any]]:
    """Return, in a rank, the file to write if it is rank 0, and the settings."""
    options = argparse.ArgumentParser()
    options.add_argument("out", type=Path)
    options.add_argument("settings", type=json.loads)
    given = options.parse_args()
    return given.out, given.settings
