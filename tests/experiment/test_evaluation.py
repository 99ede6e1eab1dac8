import dataclasses
import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError
from gmeta.experiment.report import page
from gmeta.experiment.results import evaluation_json
from gmeta.experiment.results.evaluation import MethodResult, SplitResult, Spread, TrainingRun
from support.evaluations import METRICS_BY_STEPS, example_evaluation


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=6))
def test_spread_is_the_sample_standard_deviation(values):
    spread = Spread.of([*values, math.nan])
    assert spread.mean == pytest.approx(sum(values) / len(values))
    assert spread.deviation == pytest.approx(statistics.stdev(values))
    assert (spread.defined, spread.total) == (len(values), len(values) + 1)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.75, 1.0, 1.25], "1.000±.250"),
        ([1.0, 4.0], "2.500±2.121"),
        ([0.5], "0.500"),
        ([0.5, math.nan], "0.500 (1/2)"),
        ([0.25, 0.75, math.inf], "0.500±.354 (2/3)"),
        ([math.nan] * 3, "–"),
        ([], "–"),
    ],
)
def test_spread_as_text(values, text):
    assert Spread.of(values).format() == text


def test_round_trip_keeps_everything(tmp_path):
    evaluation = example_evaluation()
    loaded = evaluation_json.load(evaluation_json.save(evaluation, tmp_path / "new" / "cold.json"))
    assert evaluation_json.to_json(loaded) == evaluation_json.to_json(evaluation)
    assert list(loaded.methods) == ["maml", "joint", "item_mean"]
    assert loaded.methods["maml"].results[1]["mae"] == pytest.approx([0.915, 0.917, 0.919])
    assert loaded.support_curve["joint"][16] == pytest.approx([0.920, 0.922, 0.924])
    assert loaded.training["maml"][2].curves["mae"][3] == pytest.approx(0.922)
    for part in ("title", "data", "config", "notes", "seconds", "seeds", "support_steps"):
        kept, given_ = getattr(loaded, part), getattr(evaluation, part)
        assert (tuple(kept) == tuple(given_)) if part in ("notes", "seeds") else kept == given_


def test_the_json_file_is_the_table_as_data(tmp_path):
    evaluation = example_evaluation()
    document = json.loads(evaluation_json.save(evaluation, tmp_path / "cold.json").read_text())
    seen = set()
    for method in document["methods"]:
        for result in method["results"]:
            for metric, value in result["metrics"].items():
                spread = evaluation.spread(method["name"], result["steps"], metric)
                assert (value["mean"], value["spread"]) == (spread.mean, spread.deviation)
                seen.add((method["name"], result["steps"], metric))
    expected = {(m, s, k) for m, steps in METRICS_BY_STEPS.items() for s, row in steps.items() for k in row}
    assert expected < seen


def test_undefined_numbers_are_null_in_a_file_that_any_reader_takes(tmp_path):
    method = MethodResult("MAML", "", {0: {"mae": [0.9, math.nan, math.inf], "auc": [math.nan] * 3}})
    run = TrainingRun([1, 2], {"mae": [math.nan, 0.9]})
    evaluation = dataclasses.replace(
        example_evaluation(), methods={"maml": method}, training={"maml": [run]}, support_curve={}
    )
    path = evaluation_json.save(evaluation, tmp_path / "cold.json")
    document = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} in the JSON"))
    metrics = document["methods"][0]["results"][0]["metrics"]
    assert metrics["mae"] == {"mean": 0.9, "spread": None, "per_seed": [0.9, None, None]}
    assert metrics["auc"]["mean"] is None
    loaded = evaluation_json.load(path)
    assert loaded.spread("maml", 0, "mae").format() == "0.900 (1/3)"
    assert math.isnan(loaded.training["maml"][0].curves["mae"][0])


def edited(**change):
    return {**evaluation_json.to_json(example_evaluation()), **change}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a gmeta-evaluation document"),
        ({"format": "gmeta-records", "version": 1}, "not a gmeta-evaluation document"),
        (edited(version=1), "version 1, this gmeta reads versions 2 and 3"),
        (edited(data={"name": "x", "warm_tasks": 1, "rows": 2}), r"cold_tasks.* @ document\.data"),
        (edited(seeds=[0, "1"]), r"expected int, got '1' @ document\.seeds\[1\]"),
        (edited(seeds=[0, True]), r"expected int, got True @ document\.seeds\[1\]"),
        (edited(methods={}), r"expected a list, got {} @ document\.methods"),
        (edited(seeds=[0, 1]), "3 values for 2 seeds"),
        (edited(methods=[]), "at least one seed and one method"),
        (edited(seconds={"train": "long"}), r"expected float, got 'long' @ document\.seconds\['train'\]"),
        ({"format": "gmeta-evaluation", "version": 2}, "title"),
    ],
)
def test_a_broken_document_is_refused_with_its_place(tmp_path, document, message):
    path = tmp_path / "cold.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message) as caught:
        evaluation_json.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "gmeta evaluate --json" in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe"])
def test_a_file_that_is_not_json_is_refused(tmp_path, content):
    path = tmp_path / "cold.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not JSON"):
        evaluation_json.load(path)
    with pytest.raises(DataError, match="No such file"):
        evaluation_json.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": []}, "at least one seed"),
        (
            {"methods": {"maml": MethodResult("", "", {0: {"mea": [1.0]}})}},
            "'mea': not a metric; there are mae",
        ),
        ({"methods": {"maml": MethodResult("", "", {3: {"mae": [1.0, 2.0]}})}}, "'maml', 3 steps.*2 values"),
        ({"support_curve": {"other": {1: [1.0]}}}, "'other' has a curve but no results"),
        ({"support_curve": {"maml": {4: [1.0, 2.0]}}}, "'maml' at 4 ratings: 2 values for 3 seeds"),
        ({"training": {"maml": [TrainingRun([1], {"loss": [1.0, 2.0]})]}}, "2 values for 1 epochs"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(example_evaluation(), **change)


@pytest.mark.parametrize("value", [math.nan, object()])
def test_a_config_that_json_cannot_say_is_refused_and_nothing_is_written(tmp_path, value):
    evaluation = dataclasses.replace(example_evaluation(), config={"alpha": value})
    with pytest.raises(ConfigError, match="config must be JSON values"):
        evaluation_json.save(evaluation, tmp_path / "cold.json")
    assert not list(tmp_path.iterdir())


def test_best_looks_the_right_way():
    evaluation = example_evaluation()
    assert evaluation.best("mae") == ("maml", 1)
    assert evaluation.best("ndcg@3") == ("joint", 1)
    none = MethodResult("", "", {0: {"mae": [math.nan] * 3}})
    assert dataclasses.replace(evaluation, methods={"maml": none, "joint": none}).best("mae") is None


def test_table_marks_the_best_of_each_column_and_its_ties():
    evaluation = example_evaluation()
    assert page.header(evaluation) == ["MAE ↓", "RMSE ↓", "AUC ↑", "nDCG@1 ↑", "nDCG@3 ↑"]
    rows = page.rows(evaluation)
    assert [(row.label, row.steps) for row in rows if row.first] == [
        ("MAML", "0"),
        ("joint training", "0"),
        ("item mean", ""),
    ]
    best = {
        title: [(row.label, row.steps) for row in rows if row.cells[column].best]
        for column, title in enumerate(page.header(evaluation))
    }
    assert best == {
        "MAE ↓": [("MAML", "1")],
        "RMSE ↓": [("MAML", "5")],
        "AUC ↑": [("MAML", "5"), ("joint training", "5")],
        "nDCG@1 ↑": [("joint training", "0"), ("joint training", "1")],
        "nDCG@3 ↑": [("joint training", "1"), ("joint training", "5")],
    }


def test_terminal_table_fits_80_columns_without_cutting_a_number():
    from rich.console import Console

    console = Console(width=80, record=True, color_system=None, file=None)
    with console.capture() as capture:
        console.print(page.rich_table(example_evaluation()))
    text = capture.get()
    assert "…" not in text
    assert "0.917±.002*" in text
    assert "0.974 " in text
    assert "121 cold tasks, 3 seeds: mean ± sample standard deviation; * best" in text


def with_splits():
    one = example_evaluation()
    results = {name: {0: {"mae": [0.5], "auc": [0.9]}} for name in one.methods}
    return dataclasses.replace(one, splits={"warm": SplitResult(461, results)})


def test_further_splits_have_tables_of_their_own_and_no_curves(tmp_path):
    evaluation = with_splits()
    first, warm = evaluation.sections
    assert first is evaluation
    assert (warm.data.split, warm.data.cold_tasks) == ("warm", 461)
    assert warm.metrics == ["mae", "auc"]
    assert page.legend(warm) == "461 warm tasks, 3 seeds: mean ± sample standard deviation"
    assert len(page.rows(warm)) == len(evaluation.methods)
    assert [warm.support_curve, warm.training, warm.splits] == [{}, {}, {}]
    again = evaluation_json.load(evaluation_json.save(evaluation, tmp_path / "e.json"))
    assert evaluation_json.to_json(again) == evaluation_json.to_json(evaluation)
    assert again.sections[1].spread("maml", 0, "mae").mean == 0.5


def test_further_splits_have_the_same_methods_and_checked_values():
    evaluation = with_splits()
    results = evaluation.splits["warm"].results
    for splits in ({"cold": SplitResult(1, results)}, {"warm": SplitResult(1, {"maml": results["maml"]})}):
        with pytest.raises(ConfigError, match="must be another than 'cold' and have the methods maml"):
            dataclasses.replace(evaluation, splits=splits)
    short = {**results, "maml": {0: {"mae": [0.5, 0.6]}}}
    with pytest.raises(ConfigError, match="2 values for 3 seeds"):
        dataclasses.replace(evaluation, splits={"warm": SplitResult(1, short)})
