"""`gmeta tune`: studies that share a budget, go on after Ctrl-C and a full disk, and the settings file."""

import os
import resource
import signal
import sqlite3
from dataclasses import dataclass, field, replace

import numpy as np
import optuna
import pytest

from gmeta.core.errors import GmetaError, NotFiniteError
from gmeta.core.json_values import parse_toml
from gmeta.core.settings import from_mapping, to_toml, without_defaults
from gmeta.core.terminal import Interrupts
from gmeta.experiment.plan.experiment_config import (
    ExperimentConfig,
    FeatureSettings,
    MethodConfig,
    default_methods,
    own_methods,
)
from gmeta.experiment.plan.generative_config import GenerativeMethod
from gmeta.experiment.plan.next_item_config import NextItemConfig, NextItemMethod, TwoTowerMethod
from gmeta.experiment.plan.ranking_config import RankingMethod
from gmeta.experiment.plan.ranking_config import default_methods as ranking_methods
from gmeta.experiment.search import study as studies
from gmeta.experiment.search.study import (
    FILE_NAME,
    Choice,
    Measured,
    Search,
    Tunable,
    get_setting,
    search_settings,
)
from gmeta.experiment.search.study import put_setting as put
from gmeta.experiment.search.tunables import (
    FAMILIES,
    cold_start_space,
    generative_space,
    next_item_space,
    ranking_space,
    retrieval_space,
)
from gmeta.meta import InnerLoop, Momentum
from support.data_files import prepared_clicks

USUAL = own_methods(100)["joint"]


@dataclass
class Law:
    """A method whose loss is that of a law."""

    best: float = 8e-3
    seen: list = field(default_factory=list)

    def __call__(self, method, report, interrupts):
        self.seen.append(method)
        loss = 1 + abs(np.log(method.learning_rate / self.best))
        for part in (1, 2):
            report(part, 5 * loss / part)
        return Measured(loss, method, loss)


def tunable(law, name="joint", usual=USUAL):
    space = cold_start_space([usual])[:2]  # of few settings: each is a write
    return Tunable(name, usual.label, [usual], space, law, seconds=1.0)


def search(*tunables, begun=None, maximize=False):
    return Search(tunables, "log loss", maximize, begun or {})


def run(searched, folder, trials=None, seconds=100.0):
    said = []
    found = search_settings(searched, folder, seconds=seconds, trials=trials, say=said.append)
    return found, said


def test_a_search_begins_with_the_present_settings_and_goes_on_where_it_ended(tmp_path):
    law = Law()
    found, said = run(search(tunable(law)), tmp_path, trials=2)
    assert law.seen[0] == USUAL
    assert "begins: 100 s, 100 s a method, are about 2 of joint training (1 s each, estimated)" in said[0]
    assert found.methods[0].before == pytest.approx(1 + np.log(4))
    again, said = run(search(tunable(law)), tmp_path, trials=12)
    assert "goes on after 2 trials" in said[0]
    [tuned] = again.methods
    assert tuned.trials + tuned.pruned == len(law.seen) == 14
    assert len(set(map(repr, law.seen))) == 14  # none is repeated
    best = min(law.seen, key=lambda method: abs(np.log(method.learning_rate / law.best)))
    assert (tuned.method, tuned.after) == (
        best,
        pytest.approx(1 + abs(np.log(best.learning_rate / law.best))),
    )
    assert f"learning_rate = {best.learning_rate:.3g}" in tuned.changes


def test_bad_trials_are_ended_early_and_tiny_gains_keep_the_settings(tmp_path):
    found, _ = run(search(tunable(Law(best=USUAL.learning_rate))), tmp_path, trials=14)
    [tuned] = found.methods
    assert tuned.pruned > 0
    assert (tuned.method, tuned.changes, tuned.before) == (USUAL, [], tuned.after)


def test_methods_get_equal_times_whatever_a_trial_takes(tmp_path, monkeypatch):
    cost, order = {"joint": 1.0, "maml": 3.0}, []
    monkeypatch.setattr(studies._Study, "seconds", lambda self: self.own * cost[self.tunable.name])

    def of(name):
        law = Law()
        return tunable(lambda *given: order.append(name) or law(*given), name)

    run(search(of("joint"), of("maml")), tmp_path, trials=6)
    assert order[:8] == ["joint", "maml", "joint", "joint", "joint", "maml", "joint", "joint"]
    assert sorted(order) == ["joint"] * 6 + ["maml"] * 6


def test_a_trial_is_ended_at_the_deadline(tmp_path):
    law = Law()

    def endless(method, report, interrupts):
        law.seen.append(method)
        for part in range(1 << 30):
            report(part, 1.0)

    found, _ = run(search(tunable(endless)), tmp_path, seconds=1.0)
    assert (len(law.seen), found.methods[0].pruned) == (1, 0)
    assert (found.methods[0].before, found.methods[0].method) == (None, USUAL)
    found, _ = run(search(tunable(law)), tmp_path, trials=1)  # a longer call begins with them again
    assert found.methods[0].before is not None


def test_other_data_begin_other_studies(tmp_path):
    run(search(tunable(Law()), begun={"data": "a"}), tmp_path, trials=1)
    found, said = run(search(tunable(Law()), begun={"data": "b"}), tmp_path, trials=1)
    assert found.methods[0].trials == 1
    assert said[0].startswith("begins; earlier trials were of other data or settings: ")


def test_an_interrupt_leaves_a_study_that_goes_on(tmp_path):
    law = Law()

    def interrupted(method, report, interrupts):
        if len(law.seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return law(method, report, interrupts)

    found, _ = run(search(tunable(interrupted)), tmp_path)
    assert found.interrupted
    assert found.methods[0].trials == 2
    found, _ = run(search(tunable(law)), tmp_path, trials=1)
    assert (found.interrupted, found.methods[0].trials) == (False, 3)


def test_settings_that_diverge_count_as_the_worst(tmp_path):
    law = Law()

    def diverges(method, report, interrupts):
        if method == USUAL:
            raise NotFiniteError("the loss is nan")
        return law(method, report, interrupts)

    found, said = run(search(tunable(diverges)), tmp_path, trials=3)
    assert "joint training, trial 1: diverges: the loss is nan" in said
    assert found.methods[0].before == float("inf")
    assert found.methods[0].changes


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_the_first_trial_of_a_killed_process_is_repeated(tmp_path):
    with studies._explain_errors(tmp_path):
        storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / FILE_NAME}", heartbeat_interval=1)
        killed = studies._Study.open(tunable(Law()), search(), storage)
        killed._begin_with_starts()
        storage.record_heartbeat(killed.study.ask()._trial_id)
    with sqlite3.connect(tmp_path / FILE_NAME) as held:
        held.execute("update trial_heartbeats set heartbeat = datetime('now', '-1 hour')")
    law = Law()
    found, _ = run(search(tunable(law)), tmp_path, trials=1)
    assert law.seen == [USUAL]
    assert found.methods[0].before == found.methods[0].after


def test_a_full_disk_ends_the_search_in_one_line_and_keeps_the_trials(tmp_path):
    law = Law()
    run(search(tunable(law)), tmp_path, trials=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / FILE_NAME).stat().st_size, hard))
    try:
        with pytest.raises(GmetaError, match=r"study\.db: .*make room or mend the file") as error:
            run(search(tunable(law)), tmp_path, trials=500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    with sqlite3.connect(tmp_path / FILE_NAME) as held:
        assert held.execute("pragma integrity_check").fetchone() == ("ok",)
    found, _ = run(search(tunable(law)), tmp_path, trials=1)
    assert found.methods[0].trials >= 3


@pytest.mark.shown_by("test_a_search_begins_with_the_present_settings_and_goes_on_where_it_ended")
def test_a_trial_of_cold_start_trains_and_measures_its_parts(tmp_path):
    clicks = prepared_clicks(tmp_path, users=80, rows=12)
    small = {"label": "joint training", "description": "Trains.", "epochs": 4, "inner": {"steps": 0}}
    given = {"tasks_per_batch": 16, "embedding_dim": 4, "hidden": [4], "evaluation_steps": [0]}
    family = FAMILIES["cold-start"]
    config = family.plan(
        {**given, "methods": {"joint": small}, "budget": "2m"}, clicks, "config", "raise"
    ).config
    searched = family.search(config, clicks, "raise")
    [joint] = searched.tunables
    reported = []
    found = joint.evaluate(joint.starts[0], lambda *each: reported.append(each), Interrupts())
    assert [step for step, _ in reported] == [25, 50, 75]
    losses = [loss for _, loss in reported] + [found.itself]
    assert found.value == min(losses) < max(losses)
    assert found.method.epochs == 1 + losses.index(min(losses))
    interrupts = Interrupts()
    interrupts.came = True
    with pytest.raises(KeyboardInterrupt):
        joint.evaluate(joint.starts[0], lambda *_: None, interrupts)


# The spaces, and the settings file.

METHODS = [
    *default_methods().values(),
    *own_methods(7).values(),
    replace(USUAL, row_learning_rate=1e-3, inner=InnerLoop("anil", optimizer=Momentum(momentum=0.8))),
]
OF_RETRIEVAL = [
    TwoTowerMethod("two-tower"),
    TwoTowerMethod("products", normalize=False, temperature=1.0, law="in-batch"),
]
OF_GENERATIVE = [
    GenerativeMethod("generative", "generative"),
    GenerativeMethod("flat", "generative", form="flat", codes=32, softmax="codes"),
]
OF_NEXT_ITEM = [
    NextItemMethod("SASRec"),
    NextItemMethod('an "odd" name\x7f\n', "hstu", dim=96, heads=3, times=False),
    NextItemMethod("cosines", normalize=True, temperature=0.01),
]


def complete(method):
    return method.complete(np.array([3, 5]), 100, [])


@pytest.mark.parametrize(
    ("method", "space"),
    [(each, cold_start_space([each])) for each in METHODS]
    + [(each, next_item_space([each])) for each in OF_NEXT_ITEM]
    + [(completed, generative_space([completed])) for completed in map(complete, OF_GENERATIVE)]
    + [(each, retrieval_space([each])) for each in OF_RETRIEVAL]
    + [(each, ranking_space([each])) for each in (*ranking_methods().values(), RankingMethod("GRM", "grm"))],
)
def test_a_space_contains_the_present_settings_and_only_settings_that_a_method_takes(method, space):
    for each in space:
        now = get_setting(method, each.key)
        bounds = each.values if isinstance(each, Choice) else (each.least, each.most)
        assert now in bounds or min(bounds) <= now <= max(bounds)
        for bound in bounds:
            assert get_setting(put(method, each.key, each.round(bound)), each.key) == each.round(bound)


@pytest.mark.parametrize("method", [*METHODS, *OF_NEXT_ITEM, *OF_GENERATIVE, *OF_RETRIEVAL])
def test_a_settings_file_gives_the_method_again_and_states_no_default(method):
    text = to_toml({"methods": {"a": without_defaults(method)}}, {"methods.a": "found"})
    assert "# found\n[methods.a]\n" in text
    assert from_mapping(type(method), parse_toml(text)["methods"]["a"]) == method
    assert "max_length" not in text
    assert ("epochs" in text) == (method.epochs != type(method).__dataclass_fields__["epochs"].default)


def test_a_settings_file_gives_the_experiment_again():
    config = ExperimentConfig(
        features={"item id": FeatureSettings(dim=8), "tags": FeatureSettings(combiner="sqrtn")},
        measured_rows=(2, 0),
        methods={"a.b": MethodConfig("A", "b", epochs=3)},
        positive=1e-7,
    )
    assert from_mapping(ExperimentConfig, parse_toml(to_toml(without_defaults(config)))) == config
    other = NextItemConfig("item", core=(2, 3), seen=False)
    assert from_mapping(NextItemConfig, parse_toml(to_toml(without_defaults(other)))) == other
