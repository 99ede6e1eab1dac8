"""The report's first sentence, what methods owe their place to, and when they pass baselines."""

import dataclasses
import json

import pytest

from gmeta.experiment.report.figures import draw, reliability_rows
from gmeta.experiment.report.findings import headline, passage_sentences, passing_size
from gmeta.experiment.report.page import difference_header, difference_rows, write_report
from gmeta.experiment.results import evaluation_json
from gmeta.experiment.results.evaluation import Calibration
from gmeta.experiment.results.metrics import Bootstrap, Comparison
from support.evaluations import example_evaluation


def compared(low, high, **means):
    """An evaluation of these mean errors by step, in which MAML is compared with the item mean."""
    evaluation = example_evaluation([0])
    results = {name: {step: {"mae": [mean]} for step, mean in steps.items()} for name, steps in means.items()}
    methods = {
        name: dataclasses.replace(evaluation.methods[name], results=found) for name, found in results.items()
    }
    found = [
        Comparison("maml", step, "item_mean", "mae", mean - means["item_mean"][0], low, high)
        for step, mean in means["maml"].items()
    ]
    return dataclasses.replace(
        evaluation,
        methods=methods,
        support_curve={},
        training={},
        bootstrap=Bootstrap(2000, 0.95, found),
    )


HOW = "over 121 tasks (paired bootstrap of tasks, 2,000 draws, 95% interval)"


def test_a_win_whose_interval_leaves_out_zero_is_said_first_with_the_reason():
    evaluation = compared(-0.24, -0.16, maml={0: 1.0, 1: 0.7, 5: 0.72}, item_mean={0: 0.9})
    first, second, *_ = headline(evaluation)
    assert first == (
        "MAML beats item mean, the strongest baseline, on cold tasks: MAE 0.700 after 1 step against 0.900, "
        f"difference -0.200 [-0.240, -0.160] {HOW}."
    )
    assert second == "The reason: one step on a task’s own rows takes it there from 1.000."
    by_features = headline(compared(-0.24, -0.16, maml={0: 0.7, 1: 0.8}, item_mean={0: 0.9}))
    assert "what it has learnt of the features holds for new tasks too" in by_features[1]


def test_a_defeat_is_said_plainly():
    first, second, *_ = headline(compared(0.1, 0.3, maml={0: 1.2, 1: 1.1}, item_mean={0: 0.9}))
    assert first == (
        "No method beats item mean, the strongest baseline, on cold tasks: MAML has MAE 1.100 after 1 step "
        f"against 0.900, difference +0.200 [+0.100, +0.300] {HOW}."
    )
    assert second.startswith("The reason: its steps, from 1.200, end no further down than what the baseline")


def test_a_difference_whose_interval_includes_zero_is_no_win():
    first, second, *_ = headline(compared(-0.2, 0.01, maml={0: 0.8, 1: 0.81}, item_mean={0: 0.9}))
    assert first == (
        "No method’s win over item mean, the strongest baseline, is certain on cold tasks: MAML has MAE "
        f"0.800 before adaptation against 0.900, difference -0.100 [-0.200, +0.010] {HOW}, and this interval "
        "includes zero."
    )
    assert second.startswith("The reason: its steps on a task’s own rows don’t help")


@pytest.mark.parametrize(("mean", "says"), [(0.9, "No win is proven"), (0.7, "No method beats item mean")])
def test_without_an_interval_there_is_no_win(mean, says):
    evaluation = compared(0, 0, maml={0: 0.8, 1: 0.8}, item_mean={0: mean})
    first = headline(dataclasses.replace(evaluation, bootstrap=None))[0]
    assert first.startswith(says)


def test_the_strongest_baseline_is_the_rival():
    one = compared(0.1, 0.3, maml={0: 0.8, 1: 0.7}, item_mean={0: 0.9})
    strong = dataclasses.replace(one.methods["item_mean"], label="kriging", results={0: {"mae": [0.6]}})
    bootstrap = Bootstrap(
        2000,
        0.95,
        [*one.bootstrap.comparisons, Comparison("maml", 1, "kriging", "mae", 0.1, 0.05, 0.15)],
    )
    evaluation = dataclasses.replace(one, methods={**one.methods, "kriging": strong}, bootstrap=bootstrap)
    assert headline(evaluation)[0].startswith(
        "No method beats kriging, the strongest baseline, on cold tasks"
    )
    assert difference_header(evaluation) == ["MAE"]
    assert difference_rows(evaluation) == [
        ("MAML after 1 step", "kriging", [("+0.100 [+0.050, +0.150]", False)]),
        ("MAML after 1 step", "item mean", [("-0.200 [+0.100, +0.300]", False)]),
    ]


def test_a_method_passes_where_it_is_ahead_and_stays_ahead():
    ahead = {1: [0.7], 2: [0.9], 4: [0.7], 8: [0.7, 0.5]}
    baseline = {1: [0.8], 2: [0.8], 4: [0.8], 8: [0.7]}
    assert passing_size(ahead, baseline) == 4
    assert passing_size(baseline, ahead) is None
    assert passing_size({1: [0.1]}, {2: [0.2]}) is None
    assert passing_size({1: [float("nan")]}, {1: [0.2]}) is None


def test_the_report_says_from_how_many_rows_on_methods_pass_baselines():
    evaluation = example_evaluation()
    curve = {**evaluation.support_curve, "item_mean": {1: [0.96], 4: [0.96], 16: [0.9210]}}
    evaluation = dataclasses.replace(evaluation, support_curve=curve)
    assert passage_sentences(evaluation) == [
        "MAML doesn’t pass item mean with up to 16 support rows.",
        "Joint training doesn’t pass item mean with up to 16 support rows.",
    ]
    curve["item_mean"] = {1: [0.96], 4: [0.96], 16: [0.96]}
    assert passage_sentences(evaluation)[0] == "MAML passes item mean from 4 support rows on."
    assert headline(evaluation)[-2:] == passage_sentences(evaluation)
    assert passage_sentences(example_evaluation()) == []


def with_calibration():
    one = Calibration([1.2, 1.3, 1.4], {50: [0.5] * 3, 80: [0.7] * 3, 95: [0.9] * 3}, [0.8, 1.0], [0.9, 1.2])
    evaluation = compared(-0.2, -0.1, maml={0: 0.8, 1: 0.7}, item_mean={0: 0.9})
    seeds = dataclasses.replace(evaluation, seeds=(0, 1, 2))
    return dataclasses.replace(seeds, calibration={"maml": one})


def test_calibration_has_a_table_and_a_figure(tmp_path):
    evaluation = with_calibration()
    assert reliability_rows(evaluation) == [["MAML", "1.30±.10", "50 %", "70 %", "90 %"]]
    names = {drawing.name: drawing.title for drawing in draw(evaluation)}
    assert names["reliability"] == "Squared error / predicted variance: MAML 1.30"
    page = write_report(evaluation, tmp_path).read_text()
    for text in ("Calibration of variances", "1.30±.10", "Differences from baselines", "2,000 times", "95%"):
        assert text in page


def test_comparisons_and_calibration_are_read_back(tmp_path):
    evaluation = with_calibration()
    again = evaluation_json.load(evaluation_json.save(evaluation, tmp_path / "e.json"))
    assert evaluation_json.to_json(again) == evaluation_json.to_json(evaluation)
    assert again.bootstrap.find("maml", 1, "item_mean", "mae").wins
    assert again.calibration["maml"].coverage == {50: (0.5,) * 3, 80: (0.7,) * 3, 95: (0.9,) * 3}


def test_a_file_of_before_is_read_and_shows_no_win(tmp_path):
    document = evaluation_json.to_json(example_evaluation())
    for name in ("bootstrap", "calibration"):
        del document[name]
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**document, "version": 2}))
    evaluation = evaluation_json.load(path)
    assert (evaluation.bootstrap, evaluation.calibration) == (None, {})
    assert headline(evaluation)[0] == (
        "No win is proven on cold tasks: MAML has MAE 0.917 after 1 step against 0.974 of item mean, the "
        "strongest baseline, but no interval of the difference was measured."
    )
    assert "Differences from baselines" not in write_report(evaluation, tmp_path).read_text()
