"""The command line, ``gmeta``: a subcommand's module is imported when the subcommand runs.

``gmeta --help`` lists the subcommands from `COMMANDS` alone, so it answers at once. Only the subcommands that
need TensorFlow import it. `options` and `rank_options` are shared by several subcommands, and the modules
``doctor_*`` are the parts of ``gmeta doctor``.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import click

from gmeta.core.errors import GmetaError
from gmeta.core.terminal import remember_interrupts
from gmeta.core.version import __version__

__all__ = ["COMMANDS", "CommandLine", "main"]

COMMANDS = {
    "doctor": "Describe this installation and its problems.",
    "prepare": "Turn tables of events, or MovieLens files, into a prepared data set.",
    "history": "Keep users' histories in a store, and show them.",
    "train": "Train on a prepared data set; resume where a run stopped.",
    "tune": "Search for better settings of a run's methods, within a budget of time.",
    "launch": "Run a program of yours on several ranks.",
    "workers": "Read data for processes that train, here or on other machines.",
    "evaluate": "Measure what a run has learned, and write the report.",
    "recommend": "Write the likeliest items of users.",
    "predict": "Score the rows of new files with a run.",
    "semantic-ids": "Make codes of items out of their vectors, for generative retrieval.",
    "export": "Write a trained model for TensorFlow Serving.",
    "serve": "Serve an exported model over gRPC, without TensorFlow Serving.",
    "publish": "Publish the model of a run on a stream for servers.",
    "deliver": "Send a published model's changes to servers.",
    "inspect": "List what a checkpoint holds: tables, rows, sizes, steps, largest norms.",
    "tables": "Export tables of a checkpoint for NumPy, pandas and other stores.",
}
"""Subcommand -> its one-line help. The function is ``gmeta.cli.<name>.command``, with ``_`` for ``-``."""

_ELSEWHERE = {
    "launch": "rank_options:launch_command",
    "workers": "rank_options:workers_command",
    "evaluate": "predict:evaluate_command",
    "recommend": "predict:recommend_command",
    "export": "publish:export_command",
    "serve": "publish:serve_command",
    "deliver": "publish:deliver_command",
    "tables": "inspect:tables_command",
}
"""Subcommand -> the module and the function, for those in the module of another one."""

_INTERRUPTED = 130  # the exit code that a shell reports after SIGINT


class CommandLine(click.Group):
    """A group that imports a subcommand when it runs, and prints its errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in `COMMANDS`, in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand's module and return its command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, function = _ELSEWHERE.get(cmd_name, f"{cmd_name.replace('-', '_')}:command").partition(":")
        command: click.Command = getattr(importlib.import_module(f"gmeta.cli.{module}"), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand.

        Exit codes: 0 success; 1 a check failed (`gmeta doctor`); 2 an error that the user can fix; 130
        interrupted. Any other error is a bug, and keeps its traceback.
        """
        with remember_interrupts() as interrupts:
            try:
                return super().invoke(ctx)
            except (click.exceptions.Exit, click.ClickException, BrokenPipeError):
                raise  # click's own errors; the reader of the output may have stopped (`| head`)
            except (Exception, KeyboardInterrupt) as error:
                ended = KeyboardInterrupt() if interrupts.came else error  # C++ may have changed its type
                if ctx.params["debug"] or not isinstance(ended, (GmetaError, OSError, KeyboardInterrupt)):
                    raise
                return _leave(ctx, ended)


def _leave(ctx: click.Context, error: GmetaError | OSError | KeyboardInterrupt) -> NoReturn:
    if isinstance(error, GmetaError):
        click.echo(f"gmeta: error: {error}", err=True)
        ctx.exit(error.exit_code)
    if isinstance(error, OSError):  # a full disk, a folder that can't be written
        where = f"{error.filename}: " if error.filename is not None else ""
        click.echo(f"gmeta: error: {where}{error.strerror or error}", err=True)
        ctx.exit(GmetaError.exit_code)
    click.echo("gmeta: interrupted; finished parts are kept", err=True)
    ctx.exit(_INTERRUPTED)


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gmeta")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Train recommendation models that adapt to new users from a handful of ratings."""
