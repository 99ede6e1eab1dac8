"""Bounds of what is measured: tasks outside them train, for methods and baselines alike."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gmeta.core.errors import ConfigError
from gmeta.experiment.baselines.task_rows import ItemNumbers
from gmeta.experiment.measurement.methods import measure
from gmeta.experiment.measurement.run_pool import evaluate
from gmeta.experiment.measurement.split import number_items, read_tasks, read_whole
from gmeta.experiment.plan.experiment_config import HELD_OUT, ExperimentConfig
from gmeta.experiment.plan.own_plan import plan_experiment
from gmeta.experiment.plan.task_sets import (
    count_measured,
    count_trained,
    count_unmeasured,
    measured_tasks,
    other_training_tasks,
    training_tasks,
)
from gmeta.experiment.runs.all_runs import TrainingProgress, run_training
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.preprocess import PrepareConfig, prepare
from gmeta.testing import USERS, small_100k, small_config

BOUNDS = (20, 40)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ratings of all users in one split."""
    folder = tmp_path_factory.mktemp("ratings")
    prepare(
        small_100k(folder / "raw"), folder / "data", PrepareConfig(cold_modulus=0, min_rows=1, max_rows=0)
    )
    return folder / "data"


def config(**options):
    given = {"held_out": 3, "held_out_by": "id", "measured_rows": BOUNDS, "test_splits": (HELD_OUT,)}
    return replace(small_config(epochs=1), train_split="train", **{**given, **options})


def sizes_of(tasks):
    """Task -> its number of rows."""
    return {
        int(task): int(rows)
        for batch in tasks
        for task, rows in zip(
            batch["task"],
            np.asarray(batch["support"]["mask"]).sum(1) + np.asarray(batch["query"]["mask"]).sum(1),
            strict=True,
        )
    }


@pytest.mark.parametrize("part", range(3))
@pytest.mark.shown_by(case="2")
def test_users_of_the_part_are_measured_within_bounds_and_all_others_train(data, part):
    everyone = sizes_of(
        measured_tasks(
            config(held_out=0, held_out_by="hash", measured_rows=None, test_splits=("train",)), data, "train"
        )
    )
    assert len(everyone) == USERS
    settings = config(held_out_part=part)
    measured, trained = (
        sizes_of(measured_tasks(settings, data, HELD_OUT)),
        sizes_of(training_tasks(settings, data)),
    )
    wanted = {t: n for t, n in everyone.items() if t % 3 == part and BOUNDS[0] <= n <= BOUNDS[1]}
    assert measured == wanted
    assert trained == {t: n for t, n in everyone.items() if t not in wanted}
    assert any(t % 3 == part for t in trained)
    assert count_trained(settings, data) == (len(trained), 0)
    assert count_measured(settings, data, HELD_OUT) == (len(measured), 0)
    assert count_unmeasured(settings, data, HELD_OUT) == sum(t % 3 == part for t in trained)


def test_a_method_trains_on_every_task_that_its_own_query_can_split(data):
    settings = config(query=30, measured_rows=None)
    fewer = replace(settings.methods["maml"], query=0.5)
    both = replace(settings, methods={"maml": settings.methods["maml"], "half": fewer})
    large, all_of_them = (sizes_of(training_tasks(both, data, query=query)) for query in (None, 0.5))
    assert min(large.values()) == 31
    assert min(all_of_them.values()) < 31
    assert count_trained(both, data, 30) == (len(large), len(all_of_them) - len(large))
    assert count_trained(both, data) == count_trained(both, data, 0.5) == (len(all_of_them), 0)


def test_what_is_trained_on_but_not_as_measured_is_read_whole(data):
    settings = config(query=24, measured_rows=(20, 40))
    settings = replace(settings, methods={"half": replace(settings.methods["maml"], query=0.5)})
    measured = sizes_of(measured_tasks(settings, data, "train"))
    assert set(measured.values()) <= set(range(25, 41))
    others = {
        int(task): int(rows)
        for element in other_training_tasks(settings, data)
        for task, rows in zip(element["task"], np.diff(element["row_splits"]), strict=True)
    }
    assert not set(measured) & set(others)
    assert {**measured, **others} == sizes_of(training_tasks(settings, data, query=0.5))


def test_a_plan_counts_what_it_trains_on_and_measures(data):
    given = {"train_split": "train", "test_splits": [HELD_OUT], "held_out": 3, "measured_rows": list(BOUNDS)}
    planned = plan_experiment(given, data)
    trained, measured = (
        count_trained(planned.config, data)[0],
        count_measured(planned.config, data, HELD_OUT)[0],
    )
    assert planned.notes == (f"trains on {trained} tasks (train), measures {measured} tasks (held-out)",)
    labels = sum(len(batch["label"]) for batch in training_tasks(planned.config, data, query=0.7))
    assert planned.config.labels.count == labels
    with pytest.raises(ConfigError, match="no split 'cold'; it has train"):
        plan_experiment({"train_split": "train"}, data)


@pytest.fixture(scope="module")
def begun(data, tmp_path_factory):
    settings = config(test_splits=(HELD_OUT, "train"), support_sizes=())
    settings = replace(settings, methods={"joint": settings.methods["joint"]})
    run = RunFolder(tmp_path_factory.mktemp("run"))
    run.begin(settings, data)
    return run


@pytest.fixture(scope="module")
def run(begun):
    with TrainingProgress() as progress:
        run_training(begun.load()[0], begun, begun.load()[1], progress=progress)
    return begun


@pytest.mark.shown_by("test_what_is_trained_on_but_not_as_measured_is_read_whole")
def test_baselines_are_fitted_to_every_row_that_methods_train_on(run, data):
    settings, _ = run.load()
    measured = measure(run)
    warm = read_tasks(measured_tasks(settings, data, "train"), "item", None)
    warm = warm.and_whole(read_whole(other_training_tasks(settings, data), "item", "rating", None))
    assert len(warm) == count_trained(settings, data)[0]
    numbers = ItemNumbers(np.unique(warm.whole().items))
    fitted = measured.tuned.mean.fit(number_items(warm, numbers).whole(), numbers.unknown)
    asked = number_items(read_tasks(measured_tasks(settings, data, HELD_OUT), "item", None), numbers)
    [found] = measured.splits[HELD_OUT].predictions["item_mean", 0]
    np.testing.assert_allclose(found, fitted.predict(asked))


@pytest.mark.shown_by("test_baselines_are_fitted_to_every_row_that_methods_train_on")
def test_every_split_is_measured_within_the_bounds_and_the_notes_count_the_rest(run, data):
    settings, _ = run.load()
    evaluation = evaluate(run)
    assert [one.data.cold_tasks for one in evaluation.sections] == [
        count_measured(settings, data, split)[0] for split in (HELD_OUT, "train")
    ]
    assert evaluation.data.warm_tasks == count_trained(settings, data)[0]
    held_out, train = (count_unmeasured(settings, data, split) for split in (HELD_OUT, "train"))
    bounds = "tasks have fewer than 20 or more than 40 rows"
    assert f"{held_out} held-out {bounds}: trained on, not measured" in evaluation.notes
    assert f"{train} train {bounds}: not measured" in evaluation.notes
    assert train == evaluation.data.warm_tasks - evaluation.sections[1].data.cold_tasks


def test_a_run_of_before_has_the_defaults(begun):
    held = json.loads((begun.path / "config.json").read_text())
    for name in ("held_out", "held_out_part", "held_out_by", "measured_rows"):
        del held["experiment"][name]
    held["experiment"]["test_splits"] = ["cold"]
    other = RunFolder(begun.path.parent / "before")
    other.path.mkdir()
    (other.path / "config.json").write_text(json.dumps(held))
    settings, _ = other.load()
    assert (settings.held_out_part, settings.held_out_by, settings.measured_rows) == (0, "hash", None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"held_out": 1}, "held_out=1 keeps one in this many tasks"),
        ({"held_out_part": 1}, "held_out_part=1 .* held_out=0 parts"),
        ({"held_out_by": "id"}, "held_out_by='id' .* held_out=0 parts"),
        (
            {"held_out": 3, "test_splits": (HELD_OUT,), "held_out_part": -1},
            "give a part from 0 to held_out - 1",
        ),
        ({"measured_rows": (0, 5)}, "measured_rows: the fewest must be a whole number from 1 on, got 0"),
    ],
)
def test_settings_that_hold_out_nothing_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        ExperimentConfig(**options)


def test_movielens_as_one_split_trains_on_all_who_are_not_measured(data):
    planned = plan_experiment({}, data).config
    measured = sizes_of(measured_tasks(planned, data, HELD_OUT))
    assert measured
    assert all(user % 5 == 0 and 13 <= rows <= 100 for user, rows in measured.items())
    trained = sizes_of(training_tasks(planned, data, query=0.7))
    assert not set(trained) & set(measured)
    assert set(trained) | set(measured) == set(range(1, USERS + 1))
    given = plan_experiment({"held_out_part": 1}, data).config
    assert {user % 5 for user in sizes_of(measured_tasks(given, data, HELD_OUT))} == {1}
