"""The choice of methods' settings: estimated priors, the trials' tasks, the moves, and what a run keeps."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from gmeta.core.errors import ConfigError
from gmeta.experiment.baselines.attributes import ItemAttributes
from gmeta.experiment.baselines.task_rows import Rows, Tasks
from gmeta.experiment.plan.experiment_config import HELD_OUT, MethodConfig, budget_seconds, own_methods
from gmeta.experiment.plan.own_plan import plan_experiment
from gmeta.experiment.plan.task_sets import divide_training, measured_tasks, training_tasks
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.search import trials as search
from gmeta.experiment.search.trials import LEAST_GAIN, OF_FACTORS, OF_STEPS, choose_settings, estimate_priors
from gmeta.models.zoo.factor_model import FactorSettings
from support.data_files import prepared_clicks


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    return prepared_clicks(tmp_path_factory.mktemp("clicks"), users=80, rows=16)


@pytest.mark.parametrize(("own", "shared"), [(0.3, 0.02), (0.05, 0.2)])
@pytest.mark.shown_by(case="0.3-0.02")
def test_estimated_priors_are_those_that_labels_were_drawn_by(own, shared):
    rng = np.random.default_rng(0)
    items, values, dim, users = 200, 12, 4, 1500
    kinds = rng.integers(0, values, items)
    numbers = rng.normal(0, np.sqrt(shared), (values, dim + 1))[kinds]
    numbers += rng.normal(0, np.sqrt(own), (items, dim + 1))
    drawn = rng.integers(0, items, (users, 40))
    tastes = rng.normal(0, 1, (users, dim))
    labels = numbers[drawn, 0] + np.einsum("uk,urk->ur", tastes, numbers[drawn, 1:])
    labels += rng.normal(0, 0.5, labels.shape)
    splits = np.arange(0, users * 40 + 1, 40)
    halves = (
        Rows(drawn[:, a:b].ravel(), labels[:, a:b].ravel(), splits // 2) for a, b in ((0, 20), (20, 40))
    )
    known = ItemAttributes.of({"kind": (kinds, np.ones(items, np.int64))})
    found = estimate_priors(Tasks(*halves), items, known, 1.0, FactorSettings(dim=dim))
    assert found.own_factors == pytest.approx(own, rel=0.4)
    assert found.own_bias == pytest.approx(own, rel=0.5)
    assert found.factors == pytest.approx(shared, rel=0.6)
    assert (found.dim, found.user) == (dim, FactorSettings().user)


@pytest.mark.parametrize("held_out", [2, 3, 5, 12])
@pytest.mark.shown_by(case="3")
def test_trials_measure_training_tasks_that_they_are_not_trained_on(clicks, held_out):
    config = plan_experiment({"held_out": held_out}, clicks).config
    trained, asked = divide_training(config, clicks, fewest=1)

    def tasks(batches):
        found = np.concatenate([batch["task"] for batch in batches])
        assert len(found) == len(set(found))
        return set(found)

    train = tasks(training_tasks(config, clicks, choice=trained))
    cold = tasks(measured_tasks(config, clicks, config.train_split, choice=asked))
    assert len(train) > 1.3 * len(cold) > 0
    assert not train & cold
    assert train | cold == tasks(training_tasks(config, clicks))
    assert not (train | cold) & tasks(measured_tasks(config, clicks, HELD_OUT))


def test_few_tasks_are_not_divided(clicks):
    assert divide_training(plan_experiment({}, clicks).config, clicks, fewest=40) is None


@dataclass
class Planted:
    """Trials whose loss is that of a law."""

    law: object
    cost: tuple = (1.0, 0.1)
    seen: list = field(default_factory=list)

    def seconds(self, method):
        return self.cost

    def loss(self, name, method):
        self.seen.append(method)
        return self.law(method), method


@pytest.mark.parametrize(
    ("name", "moves", "best"), [("factor_model", OF_FACTORS, 1e-2), ("joint", OF_STEPS, 1e-3)]
)
def test_moves_go_downhill_and_end_with_the_budget(name, moves, best):
    usual = own_methods(100)[name]
    trials = Planted(lambda method: 1 + abs(np.log(method.learning_rate / best)))
    found, spent = search._search(trials, name, [usual], moves, 60.0)
    assert found.method == replace(usual, learning_rate=best)
    assert (found.trials, found.after) == (len(trials.seen), 1.0)
    assert found.before == pytest.approx(1 + np.log(2))
    assert spent == pytest.approx(sum(1 + 0.1 * method.epochs for method in trials.seen))
    assert spent <= 60.0
    assert len(set(map(repr, trials.seen))) == len(trials.seen)


def test_a_tiny_gain_moves_nothing():
    usual = own_methods(100)["factor_model"]
    losses = iter(1 - LEAST_GAIN / 50 * np.arange(20))
    found, _ = search._search(Planted(lambda _: next(losses)), "factor_model", [usual], OF_FACTORS, 100.0)
    assert found.method == usual


def test_short_trials_compare_the_first_settings_alone():
    usual = own_methods(100)["factor_model"]
    other = replace(usual, learning_rate=usual.learning_rate / 2)
    trials = Planted(lambda method: method.learning_rate)
    found, spent = search._search(trials, "factor_model", [usual, other], OF_FACTORS, 4.0)
    assert trials.seen == [replace(usual, epochs=10), replace(other, epochs=10)]
    assert (found.method, spent) == (other, pytest.approx(4.0))
    for first, share in (([usual, other], 2.0), ([usual], 2.4)):
        none, spent = search._search(trials, "factor_model", first, OF_FACTORS, share)
        assert (none.method, none.trials, spent) == (usual, 0, 0.0)


def test_what_is_given_is_not_searched_over(clicks):
    methods = {"maml": {"label": "MAML", "description": "Adapts."}}
    assert plan_experiment({}, clicks).config.budget == "2m"
    assert plan_experiment({"methods": methods}, clicks).config.budget == "0"
    with pytest.raises(ConfigError, match="methods are given"):
        plan_experiment({"methods": methods, "budget": "1m"}, clicks)
    assert [budget_seconds(text) for text in ("0", "45", "1.5m", "2h", "1d")] == [0, 45, 90, 7200, 86400]
    for text in ("", "2 m", "-1", "2w"):
        with pytest.raises(ConfigError, match="budget must be a time"):
            plan_experiment({"budget": text}, clicks)


def test_a_run_goes_on_with_the_settings_that_it_chose(clicks, tmp_path):
    planned, run = plan_experiment({"budget": "1m"}, clicks).config, RunFolder(tmp_path)
    assert run.resume(planned) is None
    chosen = replace(planned, methods={"a": MethodConfig("a", "chosen", epochs=7)})
    run.begin(chosen, clicks)
    assert run.resume(planned) == chosen
    other = plan_experiment({"budget": "0"}, clicks).config
    assert run.resume(other) == other
    with pytest.raises(ConfigError, match=r"experiment\.budget is \"1m\", now \"0\""):
        run.begin(other, clicks)


# Quick: test_moves_go_downhill_and_end_with_the_budget, and those of the division and of the estimates.
@pytest.mark.slow
def test_settings_are_chosen_the_same_each_time(clicks):
    planned = plan_experiment({"budget": "40s", "tasks_per_batch": 16}, clicks).config
    planned = replace(planned, methods={"factor_model": planned.methods["factor_model"]})
    said = []
    chosen = [choose_settings(planned, clicks, say=said.append) for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert chosen[0].methods["factor_model"] != planned.methods["factor_model"]
    assert "stand for new ones" in said[0]
    assert "trials, log loss" in said[1]
    assert choose_settings(replace(planned, budget="0"), clicks, say=said.append) == replace(
        planned, budget="0"
    )
