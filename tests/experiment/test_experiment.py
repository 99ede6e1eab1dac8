import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from gmeta.core.errors import ConfigError, DataError
from gmeta.experiment.measurement.run_pool import evaluate
from gmeta.experiment.plan.experiment_config import MethodConfig
from gmeta.experiment.results import evaluation_json
from gmeta.experiment.runs.all_runs import TrainingProgress, run_training
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.meta import InnerLoop
from gmeta.testing import small_config, small_data

BASELINES = ("item_mean", "biases", "neighbours", "kriging", "factors", "attributes")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    run, data = RunFolder(folder / "run"), small_data(folder)
    run.begin(small_config(epochs=2, seeds=(0, 1)), data)
    return run, data


@pytest.fixture(scope="module")
def trained(begun):
    return *begun, go_on(small_config(epochs=2, seeds=(0, 1)), *begun)


def go_on(config, run, data):
    console = Console(record=True, width=60)
    with TrainingProgress(console) as progress:
        run_training(config, run, data, progress=progress)
    return console.export_text()


@pytest.mark.shown_by("cli/test_own_data.py::test_a_second_call_has_nothing_left_to_do")
def test_every_method_and_seed_is_said_in_a_line_of_its_own(trained):
    said = trained[2].splitlines()
    assert [line.split(":")[0] for line in said] == [
        "MAML, seed 0",
        "MAML, seed 1",
        "joint training, seed 0",
        "joint training, seed 1",
    ]


@pytest.mark.shown_by("cli/test_own_data.py::test_a_second_call_has_nothing_left_to_do")
def test_a_second_call_says_that_all_is_done(trained):
    run, data, _ = trained
    said = go_on(small_config(epochs=2, seeds=(0, 1)), run, data)
    assert said.count("all 2 epochs were done before") == 4


@pytest.mark.shown_by("cli/test_own_data.py::test_the_report_has_baselines_and_says_first_who_wins")
def test_the_evaluation_has_every_cell(trained, tmp_path):
    evaluation = evaluate(trained[0])
    assert list(evaluation.methods) == ["maml", "joint", *BASELINES]
    for baseline in BASELINES:
        assert sorted(evaluation.methods[baseline].results) == [0]
        assert sorted(evaluation.support_curve[baseline]) == [1, 4]
        compared = evaluation.bootstrap.find("maml", 1, baseline, "rmse")
        ours, theirs = (evaluation.spread(*cell, "rmse").mean for cell in (("maml", 1), (baseline, 0)))
        assert compared.difference == pytest.approx(ours - theirs)
        assert compared.low <= compared.difference <= compared.high
    assert list(evaluation.calibration) == ["kriging", "factors", "attributes"]
    for method in ("maml", "joint"):
        assert sorted(evaluation.methods[method].results) == [0, 1, 3, 5]
        assert sorted(evaluation.support_curve[method]) == [1, 4]
        assert [list(run.epoch) for run in evaluation.training[method]] == [[1, 2], [1, 2]]
        for metrics in evaluation.methods[method].results.values():
            assert set(metrics) == {"mae", "rmse", "auc", "ndcg@1", "ndcg@3"}
            assert all(len(values) == 2 and np.isfinite(values).all() for values in metrics.values())
    first, second = evaluation.methods["maml"].results[1]["mae"]
    assert first != second
    again = evaluation_json.load(evaluation_json.save(evaluation, tmp_path / "e.json"))
    assert evaluation_json.to_json(again) == evaluation_json.to_json(evaluation)


def test_other_settings_or_data_are_refused(begun, tmp_path):
    run, data = begun
    with pytest.raises(ConfigError, match=r"other settings \(experiment\.tasks_per_batch is 8, now 3\)"):
        go_on(replace(small_config(epochs=2, seeds=(0, 1)), tasks_per_batch=3), run, data)
    other = small_data(tmp_path)
    with pytest.raises(ConfigError, match=r"\(data is .*, now .*\)"):
        go_on(small_config(epochs=2, seeds=(0, 1)), run, other)


@pytest.mark.shown_by("experiment/test_measured_rows.py::test_a_run_of_before_has_the_defaults")
def test_a_run_that_was_begun_before_a_setting_existed_goes_on(trained):
    run, data, _ = trained
    file = run.path / "config.json"
    held = json.loads(file.read_text())
    for name in ("held_out", "numbers", "label", "item", "label_scale"):
        del held["experiment"][name]
    file.write_text(json.dumps(held))
    assert "all 2 epochs were done before" in go_on(small_config(epochs=2, seeds=(0, 1)), run, data)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"test_splits": ("cold", "lukewarm")}, "no split 'lukewarm'; it has warm, cold"),
        ({"features": "melu"}, "needs the columns rate, director, actor, zipcode; there are .*occupation"),
        ({"methods": {"x": MethodConfig("x", "x", InnerLoop(adapt="fc9"))}}, "method 'x': .*adapt names fc9"),
    ],
)
def test_what_cannot_work_is_found_before_the_run_is_begun(begun, tmp_path, options, says):
    run = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match=says):
        go_on(replace(small_config(), **options), run, begun[1])
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_not_trained_to_the_end_is_refused(begun, tmp_path):
    _, data = begun
    half = RunFolder(tmp_path)
    half.begin(small_config(epochs=2), data)
    with pytest.raises(DataError, match=r"maml, seed 0: 0 of 2 epochs are trained; run `gmeta train` again"):
        evaluate(half)
    with pytest.raises(DataError, match=r"no run was begun here; run `gmeta train` first"):
        evaluate(RunFolder(tmp_path / "nothing"))


def test_a_config_that_was_cut_short_is_named(begun, tmp_path):
    _, data = begun
    broken = RunFolder(tmp_path)
    for content, message in [("{", "not JSON"), (json.dumps({"data": "x"}), "incomplete")]:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(DataError, match=rf"config\.json: {message}"):
            broken.begin(small_config(), data)
