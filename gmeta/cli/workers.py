"""``gmeta workers``: reads data for training processes, here or on other machines."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from gmeta.core.errors import ConfigError


@click.command("workers")
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen; 127.0.0.1: for processes of this machine; 0.0.0.0: at all its addresses, and it "
    "is announced by its name.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="The port; 0: any that is free.",
)
@click.option(
    "--idle",
    type=click.FloatRange(min=0, min_open=True),
    help="End after so many seconds without readers.",
)
@click.option(
    "--path",
    "paths",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="A folder with modules that the function imports, searched after those installed; may be repeated.",
)
def command(folder: Path | None, host: str, port: int, idle: float | None, paths: tuple[str, ...]) -> None:
    """Read data for processes that train with gmeta.io.distribute, until Ctrl-C.

    The worker announces itself in FOLDER, which it shares with the training processes: there they find the
    workers and the key that admits them. Start as many workers as you like, on any machine, at any time.
    Without FOLDER, set GMETA_WORKERS_KEY to the same long random text on both sides, and name the printed
    address.

    Whoever has the key can run programs here, so keep it and the folder secret. Nobody else can, because both
    sides prove that they know the key and sign what they send; but nothing is encrypted.
    """
    import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2

    import tensorflow as tf  # isort: skip

    from gmeta.io.service.worker import WorkerServer, key_of

    key = key_of(folder)
    sys.path += paths
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    tf.config.set_visible_devices([], "GPU")  # they are for training
    try:
        server = WorkerServer(host, port, key, folder)
    except OSError as error:
        raise ConfigError(
            f"can't listen at {host}:{port}: {error.strerror or error}; give another --port"
        ) from error
    click.echo(f"a worker at {server.address}" + (f", announced in {folder}" if folder else ""))
    try:
        server.serve(idle)
    except KeyboardInterrupt:
        click.echo("")
    finally:
        server.close()
        click.echo(f"ended; {server.pieces} pieces begun, {server.elements} elements sent")
