"""A pipeline asks for the rows of later batches where they may move to a GPU, and only there."""

from __future__ import annotations

import functools

import pytest

from gmeta.ops import HashTable
from gmeta.policies import Tiers
from support.cells import slow_but
from support.pipeline_runs import differences, take_moves, train_at_depth
from support.tables import give_tiers


@functools.cache
def at_depth_0(kind):
    return train_at_depth(kind, 0)


@pytest.fixture
def traced(monkeypatch):
    """The table and the result of each prefetch and peek; only the tables of "other" have tiers."""
    made = {"prefetch": [], "peek": []}
    originals = {name: getattr(HashTable, name) for name in ("__init__", *made)}

    def make(self, *args, **kwargs):
        originals["__init__"](self, *args, **kwargs)
        if self.name.startswith("other/"):
            self._tiers = Tiers(hbm_rows=4)

    def note(name, self, keys):
        done = originals[name](self, keys)
        made[name].append((self.name, done))
        return done

    monkeypatch.setattr(HashTable, "__init__", make)
    for name in made:
        monkeypatch.setattr(HashTable, name, functools.partialmethod(functools.partial(note, name)))
    return made


# "towers" looks up `collection` once and `other` twice in a step.
@pytest.mark.parametrize(("depth", "micro_batches"), slow_but([(2, 1), (2, 2)], [(1, 1), (2, 1), (2, 2)]))
@pytest.mark.shown_by(case="2-1")
def test_only_tables_with_tiers_on_a_gpu_are_prefetched(traced, depth, micro_batches):
    train_at_depth("towers", depth, micro_batches=micro_batches, epochs=1, fit={"steps_per_epoch": 3})
    names = [name for name, _ in traced["prefetch"]]
    assert set(names) == {"other/user+tags", "other/wide"}
    for name in set(names):  # all keys of a batch at once: as many batches at the start, and one a step
        assert names.count(name) == depth + 1
    for _, op in traced["prefetch"]:
        assert op in op.graph.control_outputs  # it runs
        assert not [each for each in op.control_inputs if "HashTable" in each.type]  # and waits for no other
    peeked = [name for name, _ in traced["peek"]]
    assert peeked.count("collection/wide") == 2  # at the start, and in a step
    # Rows that are on their way don't cross the bus a second time.
    assert peeked.count("other/wide") == (4 if depth == 2 else 0)


# Quick: by chance-1; for two lookups, test_only_tables_with_tiers_on_a_gpu_are_prefetched.
@pytest.mark.parametrize(("kind", "depth"), slow_but([("by chance", 1)], [("by chance", 1), ("towers", 2)]))
def test_all_numbers_are_those_of_depth_0(kind, depth, tmp_path, monkeypatch):
    give_tiers(monkeypatch, Tiers(host_bytes=600, ssd=tmp_path), like_gpu=True)
    found, expected = train_at_depth(kind, depth), dict(at_depth_0(kind))
    assert take_moves(found) > 0
    take_moves(expected)
    assert differences(expected, found) == []


def test_a_prefetch_in_eager_mode_is_made_at_once(traced):
    train_at_depth("towers", 1, epochs=1, run_eagerly=True, fit={"steps_per_epoch": 1})
    assert {name for name, _ in traced["prefetch"]} == {"other/user+tags", "other/wide"}
