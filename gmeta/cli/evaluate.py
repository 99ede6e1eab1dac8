"""``gmeta evaluate``: writes a run's table as text, as data and as a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gmeta.cli.options import RUN, on_bad_option
from gmeta.cli.rank_options import ranks_option, start_ranks
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
def command(run_paths: tuple[Path, ...], json_path: Path | None, on_bad: OnBad, size: int | None) -> None:
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
