"""``gmeta bench``: runs one of the benchmarks in ``tools/bench``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from gmeta.core.errors import ConfigError

_FOLDER = Path(__file__).resolve().parents[2] / "tools" / "bench"


@click.command("bench", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("subject", required=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def command(subject: str | None, options: tuple[str, ...]) -> None:
    """Measure a part of gmeta beside its peers; prints a table.

    SUBJECT is a file of tools/bench; without it, the command lists them. Options go to the benchmark: --json
    FILE writes the results as data, --smoke uses small sizes, --rounds N measures everything N times, --help
    lists all of them.

    The benchmark runs in a process of its own, because a peer may need another set-up than gmeta.
    """
    if not _FOLDER.is_dir():
        raise ConfigError(
            f"benchmarks are in the repository, not in the package: no {_FOLDER}; use a checkout"
        )
    subjects = sorted(path.stem for path in _FOLDER.glob("*.py") if path.stem != "harness")
    if subject in (None, "--help", "-h"):
        click.echo(f"{command.help}\n\nSubjects: {', '.join(subjects)}")
        return
    if (file := subject.replace("-", "_")) not in subjects:
        raise ConfigError(f"no benchmark {subject!r}; there are {', '.join(subjects)}")
    raise SystemExit(subprocess.run([sys.executable, _FOLDER / f"{file}.py", *options]).returncode)
