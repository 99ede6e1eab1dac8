"""The option ``--np``: the same command on several ranks of this machine."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import click

from gmeta.core.collectives.launch import Write, launch
from gmeta.core.collectives.world import launched_size, under_launcher
from gmeta.core.errors import ConfigError

ranks_option = click.option(
    "--np",
    "size",
    type=click.IntRange(min=1),
    help="Start this many ranks on this machine; over several machines `horovodrun -H` starts the command.",
)


def start_ranks(size: int | None, *, write: Write | None = None) -> bool:
    """Run this process's own command line as `size` ranks, and wait for them.

    The ranks are given the same arguments, ``--np`` with them; for those, and without ``--np``, this does
    nothing but become a rank (`gmeta.core.collectives.init`), which without a launcher does nothing either.
    So a command calls it first, and is done if it was the launcher.

    Args:
      size: What ``--np`` was given.
      write: As in `gmeta.core.collectives.launch.launch`.

    Returns:
      Whether ranks were started, and have all ended well.

    Raises:
      RanksError: A rank failed.
      ConfigError: This is a rank of another number of ranks; or as `init`.
    """
    if under_launcher():
        if size is not None and size != launched_size():
            raise ConfigError(
                f"--np {size}, but the launcher started {launched_size()} ranks; leave --np out"
            )
    elif size is not None and size > 1:
        # The ranks end with their launcher, also when a scheduler ends that.
        before = signal.signal(signal.SIGTERM, _end)
        try:
            launch([sys.executable, "-m", "gmeta", *sys.argv[1:]], size, write=write)
        finally:
            signal.signal(signal.SIGTERM, before)
        return True
    from gmeta.core.collectives import init  # TensorFlow only if there are other ranks

    init()
    return False


def _end(number: int, frame: FrameType | None) -> Any:
    raise SystemExit(128 + number)
