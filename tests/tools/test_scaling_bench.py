"""What the scaling benchmark compares: ways of reading that give the same batches, and two outer rules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from support import warm
from support.process_ranks import run_ranks

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
SETTINGS = {"features": 3, "tasks": 5, "support": 6, "query": 2, "distinct_steps": 3, "steps": 6}


@pytest.fixture
def parts():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCH))
        yield SimpleNamespace(
            files=importlib.import_module("parts.meta.task_files"),
            rank=importlib.import_module("parts.meta.rank"),
        )
    for name in [each for each in sys.modules if each.split(".")[0] in ("harness", "parts")]:
        sys.modules.pop(name)


@pytest.mark.parametrize("read", ["text", "columnar"])
def test_batches_out_of_files_are_those_made_in_memory(parts, tmp_path, read):
    parts.files.write(tmp_path / "data", SETTINGS, 1)
    own = {**SETTINGS, "read": read, "data": str(tmp_path / "data")}
    found, expected = (list(parts.rank.dataset(settings, 5)) for settings in (own, SETTINGS))
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found, expected, strict=True):
        assert len(np.unique(ours.pop("task"))) == len(theirs.pop("task"))  # numbers of their own
        tf.nest.assert_same_structure(ours, theirs)
        for one, other in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def sums_on_rank(bench):
    import sys

    import tensorflow as tf

    from gmeta.core import collectives

    sys.path.insert(0, bench)
    from parts.meta.outer_rules import outer_rule

    rank = collectives.world().rank
    tensors = [tf.random.stateless_normal(shape, [rank, 7]) for shape in ((), (3,), (2, 5))]
    expected = collectives.allreduce_sum(tensors, name="step/dense")

    @tf.function
    def step():
        return collectives.allreduce_sum(tensors, name="step/dense")

    with outer_rule("gather"), collectives.count_collectives() as counts:
        found = [*step(), *collectives.allreduce_sum([tf.constant(1.0)], name="another")]
    return [each.numpy() for each in (*found, *expected)], counts.calls


@pytest.mark.ranks
def test_what_rank_0_gathers_is_what_all_reduce_sums():
    results = run_ranks(sums_on_rank, 3, str(BENCH))
    for sums, calls in results:
        assert calls == {"alltoall": 2, "allreduce": 1}
        found, other, expected = sums[:3], sums[3], sums[4:]
        assert other == 3
        for one, another in zip(found, expected, strict=True):
            assert one.shape == another.shape
            np.testing.assert_allclose(one, another, rtol=1e-6)
    for sums, _ in results[1:]:  # all have the same, to the last bit
        for one, another in zip(sums, results[0][0], strict=True):
            np.testing.assert_array_equal(one, another)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--network", "nvlink"], "--network names how NCCL joins GPUs, and there is none: give --gbit"),
        (["--ablation"], "on a CPU it needs --gbit"),
        (["--ablation", "--read", "text", "--gbit", "1"], "--ablation goes through --read"),
    ],
)
def test_what_a_cpu_cannot_measure_is_refused(words, says):
    run = warm.run([sys.executable, BENCH / "scaling.py", *words], timeout=300)
    assert run.returncode == 2
    assert says in run.stderr.splitlines()[-1]


def step_on_rank(bench, settings):
    import sys

    from gmeta.core import collectives

    sys.path.insert(0, bench)
    from parts.meta.outer_rules import outer_rule
    from parts.meta.rank import meta_model, task_batch

    own = range(2 * collectives.world().rank, 2 * collectives.world().rank + 2)
    found = []
    for rule in ("allreduce", "gather"):
        model = meta_model(settings)
        with outer_rule(rule), collectives.count_collectives() as counts:
            for step in range(2):
                model.train_on_batch(task_batch(settings, step, own))
        found.append(([weight.numpy() for weight in model.trainable_variables], counts.calls))
    return found


@pytest.mark.ranks
@pytest.mark.shown_by("test_what_rank_0_gathers_is_what_all_reduce_sums")
def test_a_meta_model_learns_the_same_through_rank_0():
    more = {"dim": 2, "hidden": [4], "inner_steps": 1, "wire_dtype": "float32", "adapt": "all"}
    for (expected, summed), (found, gathered) in run_ranks(step_on_rank, 2, str(BENCH), SETTINGS | more):
        assert summed.get("allreduce") == 2
        assert "allreduce" not in gathered
        assert gathered["alltoall"] == summed["alltoall"] + 4
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
