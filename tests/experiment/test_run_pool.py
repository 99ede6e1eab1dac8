"""Several runs measured as one: the metrics of all their rows together, and runs that don't go together."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from gmeta.core.errors import ConfigError, DataError
from gmeta.experiment.measurement import run_pool
from gmeta.experiment.measurement.methods import measure
from gmeta.experiment.measurement.run_pool import evaluate
from gmeta.experiment.plan.experiment_config import HELD_OUT, LabelFacts
from gmeta.experiment.report.page import write_report
from gmeta.experiment.results.evaluation import Calibration
from gmeta.experiment.results.metrics import rating_metrics
from gmeta.experiment.runs.all_runs import TrainingProgress, run_training
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.preprocess import PrepareConfig, prepare
from gmeta.testing import small_100k, small_config

ONE_SPLIT = PrepareConfig(cold_modulus=0, min_rows=1, max_rows=0)


def config(**options):
    given = {"held_out": 2, "held_out_by": "id", "measured_rows": (13, 60), "seeds": (0, 1), **options}
    small = small_config(epochs=1)
    settings = {"train_split": "train", "test_splits": (HELD_OUT,), "evaluation_steps": (0, 1), **given}
    return replace(small, methods={"joint": small.methods["joint"]}, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two folds over the same users, which are begun."""
    folder = tmp_path_factory.mktemp("folds")
    prepare(small_100k(folder / "raw"), folder / "data", ONE_SPLIT)
    for part in (0, 1):
        begun(folder, f"fold-{part}", config(held_out_part=part), folder / "data")
    return folder


TWO_SEEDS = pytest.param(
    (0, 1), marks=pytest.mark.shown_by("test_pooled_metrics_are_those_of_all_predictions_together")
)


@pytest.fixture(scope="module", params=[(0,), TWO_SEEDS], ids=["one seed", "two seeds"])
def pooled(folder, tmp_path_factory, request):
    """The evaluation of two trained folds, and what each run predicts."""
    found, trained = [], tmp_path_factory.mktemp("trained")
    with TrainingProgress() as progress:
        for part in (0, 1):
            settings, run = (
                config(held_out_part=part, seeds=request.param),
                RunFolder(trained / f"fold-{part}"),
            )
            run_training(settings, run, folder / "data", progress=progress)

    def remember(*arguments):
        found.append(measure(*arguments))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_pool, "measure", remember)
        evaluation = evaluate(*(RunFolder(trained / f"fold-{part}") for part in (0, 1)))
    return evaluation, [each.splits[HELD_OUT] for each in found]


def metrics_of(splits, cells):
    """The metrics of one seed's predictions of all splits, concatenated; ``cells`` holds each split's."""
    sizes = np.concatenate([np.diff(split.rows.row_splits) for split in splits])
    labels = np.concatenate([split.rows.labels for split in splits])
    return rating_metrics(labels, np.concatenate(cells), np.concatenate([[0], np.cumsum(sizes)]))


def test_pooled_metrics_are_those_of_all_predictions_together(pooled):
    evaluation, splits = pooled
    for name, steps in [("joint", 0), ("joint", 1), ("item_mean", 0), ("factors", 0)]:
        for seed in range(len(evaluation.config["experiment"]["seeds"]) if name == "joint" else 1):
            expected = metrics_of(splits, [split.predictions[name, steps][seed] for split in splits])
            found = evaluation.methods[name].results[steps]
            assert {metric: values[seed] for metric, values in found.items()} == pytest.approx(expected)
    for name in ("joint", "kriging"):
        expected = metrics_of(splits, [split.limited[name, 4][0] for split in splits])["mae"]
        assert evaluation.support_curve[name][4][0] == pytest.approx(expected)


def test_the_bootstrap_and_the_calibration_are_of_all_tasks(pooled):
    evaluation, splits = pooled
    ours, theirs = (evaluation.spread(*cell, "mae").mean for cell in (("joint", 1), ("biases", 0)))
    compared = evaluation.bootstrap.find("joint", 1, "biases", "mae")
    assert compared.difference == pytest.approx(ours - theirs)
    alone = [split.bootstrap(["biases"]).find("joint", 1, "biases", "mae") for split in splits]
    assert compared.high - compared.low < max(each.high - each.low for each in alone)
    labels = np.concatenate([split.rows.labels for split in splits])
    means, variances = (np.concatenate([split.varied["kriging"][0][at] for split in splits]) for at in (0, 1))
    assert evaluation.calibration["kriging"] == Calibration.of(labels, [means], [variances])


def test_every_user_within_bounds_counts_once_and_the_notes_name_the_runs(pooled, tmp_path):
    evaluation, splits = pooled
    tasks = [len(split.rows.row_splits) - 1 for split in splits]
    assert evaluation.data.cold_tasks == sum(tasks)
    assert evaluation.config["experiment"]["held_out_part"] == [0, 1]
    assert evaluation.config["experiment"]["held_out"] == 2
    assert len(evaluation.training["joint"]) == 2 * len(evaluation.config["experiment"]["seeds"])
    assert evaluation.notes[0] == "2 runs are measured as one: each predicts the tasks that it held out."
    for part in (0, 1):
        assert any(
            note.startswith(f"fold-{part}: trained on ")
            and f"{tasks[part]} tasks of part {part} measured" in note
            for note in evaluation.notes
        )
    assert "2 runs are measured as one" in write_report(evaluation, tmp_path).read_text()


def begun(folder, name, settings, data):
    run = RunFolder(folder / name)
    run.begin(settings, data)
    return run


def test_runs_that_do_not_go_together_are_refused_and_named(folder, tmp_path):
    first, second = (RunFolder(folder / f"fold-{part}") for part in (0, 1))
    data = folder / "data"
    shutil.copytree(second.path, tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"fold-1 and .*copy hold out the same part, 1"):
        evaluate(first, second, RunFolder(tmp_path / "copy"))
    wider = begun(tmp_path, "wider", config(held_out_part=1, hidden=(9,), query=5), data)
    with pytest.raises(ConfigError, match=r"fold-0 and .*wider have other settings of query, hidden"):
        evaluate(first, wider)
    prepare(small_100k(tmp_path / "raw", seed=1), tmp_path / "data", ONE_SPLIT)
    elsewhere = begun(tmp_path, "elsewhere", config(held_out_part=1), tmp_path / "data")
    with pytest.raises(ConfigError, match=r"fold-0 and .*elsewhere were trained on different data"):
        evaluate(first, elsewhere)
    both = begun(tmp_path, "both", config(held_out_part=1, test_splits=(HELD_OUT, "train")), data)
    with pytest.raises(ConfigError, match=r"both measures held-out, train: several runs"):
        evaluate(first, both)


def test_folds_may_differ_in_what_is_read_off_their_training_rows(folder, tmp_path):
    """They are refused for the training that is missing, not for their settings."""
    runs = [
        begun(
            tmp_path,
            str(part),
            config(held_out_part=part, labels=LabelFacts(10 + part, 3.5)),
            folder / "data",
        )
        for part in (0, 1)
    ]
    with pytest.raises(DataError, match="0 of 1 epochs are trained"):
        evaluate(*runs)
