"""The benchmark of the next item: what its figures say of a peer, and what of a trainer that fails."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    yield importlib.import_module("next_item")
    for name in [each for each in sys.modules if each.split(".")[0] in ("next_item", "harness", "parts")]:
        sys.modules.pop(name)


def far(seconds, reached=True):
    return {"reached": reached, "seconds": seconds}


def test_a_peer_that_reached_the_goal_is_compared(bench):
    (result,) = bench.time_way({"gmeta": far(300.0), "RecTools": far(150.0)})
    assert (result.value, result.peer_value, result.ratio) == (300.0, 150.0, 0.5)


def test_an_absent_peer_is_absent_and_not_won_against(bench):
    (result,) = bench.time_way({"gmeta": far(300.0)})
    assert (result.peer, result.peer_value, result.ratio) == ("RecTools", None, None)


def test_a_peer_short_of_the_goal_is_neither_absent_nor_compared(bench):
    (result,) = bench.time_way({"gmeta": far(300.0), "RecTools": far(1500.0, reached=False)})
    assert "peer" not in result.to_json()


def test_gmeta_short_of_the_goal_has_no_time(bench):
    assert bench.time_way({"gmeta": far(1500.0, reached=False), "RecTools": far(9.0)}) == []


class Script:
    """A trainer whose measures are given."""

    def __init__(self, validation, test):
        self.cuts, self.epochs = {"validation": validation, "test": test}, 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def train(self, share):
        assert share == 1.0
        self.epochs += 1

    def measure(self, cut):
        return self.cuts[cut][self.epochs - 1]


def reach(bench, monkeypatch, validation, test, patience=10):
    contenders = bench.Contenders(Path("none"), 1, None, 0)
    monkeypatch.setattr(bench.Contenders, "start", lambda *_: Script(validation, test))
    return bench.reach_goal(contenders, "gmeta", 5.0, patience)


def test_the_goal_counts_only_where_validation_is_best(bench, monkeypatch):
    found = reach(bench, monkeypatch, validation=[0.06, 0.05, 0.07], test=[0.04, 0.09, 0.052])
    assert (found["reached"], found["epochs"], found["test"]) == (True, 3, 0.052)


def test_the_way_ends_when_patience_does(bench, monkeypatch):
    found = reach(bench, monkeypatch, validation=[0.06, 0.05, 0.05], test=[0.04] * 3, patience=2)
    assert (found["reached"], found["epochs"], found["epoch"]) == (False, 3, 1)


def test_a_trainer_that_fails_says_why(bench):
    settings = {"file": "none", "threads": 1, "seed": 0, "negatives": None}
    said = r"No module named parts\.next_item\.none_such"
    with (
        bench.Turns(sys.executable, "none_such", settings) as trainer,
        pytest.raises(RuntimeError, match=said),
    ):
        trainer.train(1.0)


def test_a_python_without_the_peer_is_refused(bench):
    assert bench.peer_versions(None) == {"RecTools": "absent"}
    with pytest.raises(SystemExit, match="--peer-python has no RecTools"):
        bench.peer_versions(sys.executable)
