"""``gmeta evaluate`` measures what a run has learned, and two commands use it.

``gmeta predict`` scores the rows of new files, and ``gmeta recommend`` writes users' likeliest items.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gmeta.cli.options import RUN, form_of, form_options, on_bad_option, run_option, seen_option
from gmeta.cli.rank_options import ranks_option, start_apart, start_ranks
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.files import write_atomically
from gmeta.core.schema import OnBad

if TYPE_CHECKING:
    from gmeta.experiment.ranking.page import Results
    from gmeta.experiment.report.page import Beside
    from gmeta.experiment.runs.run_folder import RunFolder


@click.command("evaluate")
@click.option(
    "--run",
    "run_paths",
    multiple=True,
    default=[RUN],
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of a run. Of several runs that hold out different parts of the same data, the results are "
    "those of all their tasks together, and the report goes to the first folder.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table as data.")
@on_bad_option
@ranks_option
def evaluate_command(
    run_paths: tuple[Path, ...], json_path: Path | None, on_bad: OnBad, size: int | None
) -> None:
    """Evaluate a run on its test data, and write the report.

    For a run for the next item or retrieval, the command ranks the whole catalogue for each test user, with
    and without the items that the user has seen, and compares with baselines. For a run for ranking, it
    measures the test rows: log loss, AUC, GAUC and calibration, or errors of numbers.

    For a run for cold start, it measures the tasks of every test split before adaptation and after several
    inner steps, over all seeds of the run, and compares with baselines that are tuned on warm tasks. The
    first sentence of the report states whether a method beats the strongest baseline. If the same command
    also trained for ranking, the report covers both.
    """
    if start_ranks(size):
        return
    from rich.console import Console

    from gmeta.core.collectives import world
    from gmeta.experiment.measurement.run_pool import evaluate
    from gmeta.experiment.report.findings import headline
    from gmeta.experiment.report.page import rich_table, write_report
    from gmeta.experiment.results.evaluation_json import save
    from gmeta.experiment.runs.run_folder import RunFolder

    run, *others = map(RunFolder, run_paths)
    families = [each.family for each in (run, *others)]
    for family, evaluate_family in _EVALUATE.items():
        if family in families:
            if others:
                raise ConfigError(f"several --run are folds of cold start: name one run for {family}")
            if world().size > 1:
                raise ConfigError(f"a run for {family} is evaluated in one process: leave --np out")
            evaluate_family(run, json_path, on_bad)
            return
    evaluation = evaluate(run, *others, on_bad=on_bad)
    if world().rank > 0:
        return
    for section in evaluation.sections:
        Console().print(rich_table(section))
    for sentence in headline(evaluation)[:1]:
        click.echo(sentence)
    if json_path:
        save(evaluation, json_path)
        click.echo(f"table as data: {json_path}")
    beside = None if others or not run.beside.begun else _measure_ranking(run, on_bad)
    click.echo(f"report: {write_report(evaluation, run.path, beside=beside)}")


def _measure_ranking(run: RunFolder, on_bad: OnBad) -> Beside | None:
    """Measure the run for ranking that accompanies one for cold start; None if that isn't possible."""
    from gmeta.core.collectives import world
    from gmeta.experiment.ranking.page import about, headline, table
    from gmeta.experiment.report.page import Beside

    beside = run.beside
    try:
        if world().size > 1:
            raise ConfigError("it is evaluated in one process: leave --np out")
        run.check_beside()
        results = _evaluate_ranking(beside, None, on_bad)
    except (ConfigError, DataError) as error:
        click.echo(f"ranking is left out: {error}", err=True)
        return None
    return Beside(about(results), headline(results), *table(results), f"{beside.path.name}/report.html")


def _evaluate_catalogue(run: RunFolder, json_path: Path | None, on_bad: OnBad) -> None:
    import json

    from rich.console import Console

    from gmeta.experiment.next_item.page import evaluate_run, headline, rich_table, to_json, write_report

    results = evaluate_run(run, on_bad)
    for seen in results.measured.test:
        Console().print(rich_table(results, seen))
    for sentence in headline(results):
        click.echo(sentence)
    if json_path:
        write_atomically(json_path, json.dumps(to_json(results), indent=1) + "\n")
        click.echo(f"table as data: {json_path}")
    click.echo(f"report: {write_report(results, run.path)}")


def _evaluate_ranking(run: RunFolder, json_path: Path | None, on_bad: OnBad) -> Results:
    import json

    from rich.console import Console

    from gmeta.experiment.ranking.page import evaluate_ranking, headline, rich_table, to_json, write_report

    results = evaluate_ranking(run, on_bad)
    Console().print(rich_table(results))
    for sentence in headline(results):
        click.echo(sentence)
    if json_path:
        write_atomically(json_path, json.dumps(to_json(results), indent=1) + "\n")
        click.echo(f"table as data: {json_path}")
    click.echo(f"report: {write_report(results, run.path)}")
    return results


_EVALUATE = {
    "next-item": _evaluate_catalogue,
    "retrieval": _evaluate_catalogue,
    "ranking": _evaluate_ranking,
}
"""Family of runs -> what evaluates one, besides cold start."""


@click.command("predict")
@run_option
@click.option(
    "--data",
    multiple=True,
    required=True,
    help="CSV, Parquet or JSON: a file, a folder or a pattern; may be repeated.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("scores"),
    show_default=True,
    help="Folder of the Parquet files to write.",
)
@click.option(
    "--method", help="Which method or baseline of the run.  [default: for ranking the best in validation]"
)
@click.option("--seed", type=int, help="Which of its seeds.  [default: the first]")
@click.option(
    "--rows-per-part",
    type=click.IntRange(1),
    default=1 << 20,
    show_default=True,
    help="Records of the input in a file of OUT.",
)
@form_options
@on_bad_option
@ranks_option
def command(
    run_path: Path,
    data: tuple[str, ...],
    out: Path,
    method: str | None,
    seed: int | None,
    rows_per_part: int,
    on_bad: OnBad,
    size: int | None,
    **settings: Any,
) -> None:
    """Score the rows of new files with a trained run.

    Files are read as the run's data were prepared: with the same columns, and texts by the same hash; the
    label may be absent. OUT gets a Parquet file for each --rows-per-part records, with the record's number
    in the input, the task, the time and the item as the data set stores them, and the score: a probability,
    or a value. After an interruption the same command writes the missing files. With --np, ranks divide the
    files among them; each reads the whole input.
    """
    place = start_apart(size)
    if place is None:
        return
    from rich.console import Console

    from gmeta.cli.prepare import PrepareProgress
    from gmeta.experiment.ranking.predictions import predict_file
    from gmeta.experiment.runs.run_folder import RunFolder

    file_format, form = form_of(settings)
    with PrepareProgress(Console(quiet=True) if place.rank else None) as progress:
        written = predict_file(
            RunFolder(run_path),
            data,
            out,
            method=method,
            seed=seed,
            file_format=file_format,
            form=form,
            rows_per_part=rows_per_part,
            on_bad=on_bad,
            progress=progress,
            place=place,
        )
    for (file, reason), count in written.left_out.items() if place.rank == 0 else ():
        click.echo(f"left out: {count:,} rows of {file}: {reason}", err=True)
    were = "was" if written.before == 1 else "were"
    before = f", {written.before:,} {were} there before" if written.before else ""
    files = f"{written.parts:,} file{'s' * (written.parts != 1)}"
    click.echo(f"{written.rows:,} rows, by {written.name}: {out}, {files}{before}")


@click.command("recommend")
@run_option
@click.option(
    "--users",
    "users_path",
    type=click.Path(path_type=Path),
    help="A text file with a user in each line, or a Parquet file whose first column has the users: ids, or "
    "the texts that gmeta prepare hashed.  [default: all users of the data set]",
)
@click.option("-k", "k", type=click.IntRange(1), default=20, show_default=True, help="Items of each user.")
@click.option("--method", help="Which method or baseline of the run.  [default: the best in validation]")
@click.option("--seed", type=int, help="Which of its seeds.  [default: the first]")
@seen_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("top.parquet"),
    show_default=True,
    help="The Parquet file to write.",
)
@click.option(
    "--users-per-part",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Users in a file of the folder OUT.parts, whose files are joined in the end.",
)
@ranks_option
def recommend_command(
    run_path: Path,
    users_path: Path | None,
    k: int,
    method: str | None,
    seed: int | None,
    seen: bool | None,
    out: Path,
    users_per_part: int,
    size: int | None,
) -> None:
    """Write the likeliest items of users, from all their rows in the data set.

    The Parquet file has a row for each user: its id, in a column named as in the data set; items, a list of
    ids, the likeliest first; and scores. If the data set keeps texts, the user's text and the items' texts
    and titles follow. The file appears whole or not at all. After an interruption the same command
    continues with the parts in OUT.parts. With --np, ranks divide the parts among them.
    """
    place = start_apart(size)
    from gmeta.experiment.next_item.recommendations import join_recommendations, write_recommendations
    from gmeta.experiment.runs.run_folder import RunFolder

    if place is None:  # the ranks that this call started are done
        click.echo(f"{join_recommendations(out):,} users: {out}")
        return
    run = RunFolder(run_path)
    if run.family not in ("next-item", "retrieval"):
        raise ConfigError(
            f"{run_path} is a run of {run.family}: train one with gmeta train --for next-item or retrieval"
        )
    name, users = write_recommendations(
        run,
        out,
        users=users_path,
        k=k,
        method=method,
        seed=seed,
        leave_out_seen=None if seen is None else not seen,
        users_per_part=users_per_part,
        place=place,
    )
    if place.size == 1:
        click.echo(f"{users:,} users, by {name}: {out}")
    else:
        click.echo(f"{users:,} users, by {name}, in {out}.parts")
        if size is None and place.rank == 0:
            click.echo(f"when all {place.size} ranks are done, the same command in one process writes {out}")
