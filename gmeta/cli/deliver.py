"""``gmeta deliver``: sends a published model's changes to servers."""

from __future__ import annotations

from pathlib import Path

import click

from gmeta.core.settings import parse_duration


@click.command("deliver")
@click.option(
    "--from",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("online"),
    show_default=True,
    help="The folder of a gmeta.export.Publisher.",
)
@click.option(
    "--to",
    "urls",
    multiple=True,
    required=True,
    metavar="URL",
    help="A server's model, such as http://host:8501/v1/models/my_model, or a store of rows, such as "
    "redis://host:6379/prefix or rocksdb:///folder; may be repeated.",
)
@click.option("--follow", is_flag=True, help="Wait for more deltas and for servers, until Ctrl-C.")
@click.option(
    "--every", default="1s", show_default=True, metavar="TIME", help="How often to look for deltas."
)
def command(folder: Path, urls: tuple[str, ...], follow: bool, every: str) -> None:
    """Send servers, and stores of rows, the deltas that they lack.

    A server is the REST interface of TensorFlow Serving, started with `--model_base_path=FROM/model`. Its
    version decides which deltas it gets, so new and restarted servers catch up, and the command stores
    nothing. A store gets the rows of external tables (docs/online.md), and has its version too. Without
    --follow, an unreachable server or store is an error, raised after all others were served.
    """
    from gmeta.export.delivery import deliver

    versions = deliver(
        folder,
        urls,
        follow=follow,
        every=parse_duration(every, "--every"),
        say=lambda line: click.echo(line, err=True),
    )
    for url, version in versions.items():
        click.echo(f"{url}: version {version}")
