"""Collectives on one rank: the identity, at no cost; and the parts of them that need no second rank."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives import monitoring, place, tensors
from gmeta.core.collectives.place import launched_size
from gmeta.core.errors import CollectiveError, ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig, record_lookups
from gmeta.models import Model


@pytest.mark.parametrize("module", ["objects", "monitoring", "tensors", "entry"])
def test_examples(module: str) -> None:
    names = {"tf": tf, "alltoall": collectives.alltoall}
    result = doctest.testmod(importlib.import_module(f"gmeta.core.collectives.{module}"), extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0


def test_one_rank_imports_neither_tensorflow_nor_horovod() -> None:
    code = (
        "import sys, gmeta; gmeta.init(); sys.exit('horovod' in sys.modules or 'tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_rank_is_the_identity_and_counts_nothing() -> None:
    rows, variable = tf.constant([[1.0], [2.0]]), tf.Variable(3.0)
    with collectives.count_collectives() as counts:
        received, splits = collectives.alltoall(rows, tf.constant([2]), name="rows")
        sums = collectives.allreduce_sum([rows], name="sums")
        collectives.broadcast_variables([variable])
        collectives.barrier()
    assert received is rows
    assert sums[0] is rows
    assert splits.numpy().tolist() == [2]
    assert float(variable) == 3.0
    assert collectives.allgather_objects("x") == ["x"]
    assert collectives.broadcast_object("x") == "x"
    assert counts.total == 0


def test_names_count_within_the_outermost_function() -> None:
    seen = []

    @tf.function
    def inner() -> None:
        seen.append(tensors._unique("rows"))

    @tf.function
    def outer() -> None:
        seen.append(tensors._unique("rows"))
        inner()
        with tf.name_scope("scope"):
            seen.append(tensors._unique("keys"))

    outer()
    outer.get_concrete_function()
    assert seen == ["rows", "rows_1", "keys"]
    inner()  # traced before; in a function of its own it starts anew
    tf.function(lambda: seen.append(tensors._unique("rows")))()
    assert seen[-1] == "rows"


def test_a_failure_says_who_reports_it_and_what_to_do() -> None:
    lost = tf.errors.UnknownError(
        None, None, "Graph execution error:\n\nHorovod has been shut down.\n\t [[{{node gmeta_rows}}]]"
    )
    said = r"rank 0 of 1 lost .*gmeta_rows.*: Horovod has been shut down"
    with pytest.raises(CollectiveError, match=said), collectives.name_failures("a step"):
        raise lost
    two = "2 root error(s) found.\n  (0) INTERNAL:  gmeta lane: timed out\n\t [[{{node gmeta_keys}}]]\n"
    explained = monitoring.explain(tf.errors.InternalError(None, None, two))
    assert "in gmeta_keys: gmeta lane: timed out; another rank" in str(explained)
    both = (
        "rank 1 is in alltoall 'step/gradients' of float, 4 bytes a row, number 2, while rank 0 is in "
        "alltoall 'items/keys' of int64, 8 bytes a row, number 2"
    )
    node = "{{function_node __wrapped__GmetaLaneAlltoall_device_/job:localhost/device:CPU:0}}"
    eager = f"{node} gmeta lane: {both} [Op:GmetaLaneAlltoall] name: gmeta_items_keys"
    explained = monitoring.explain(tf.errors.UnavailableError(None, None, eager), "a step")
    assert str(explained).startswith(
        f"rank 0 of 1 during a step: the ranks make different collectives: {both}; lookups in an Embedding"
    )
    other = tf.errors.InvalidArgumentError(None, None, "shapes differ")
    assert monitoring.explain(other) is None
    with pytest.raises(tf.errors.InvalidArgumentError), collectives.name_failures("a step"):
        raise other


@pytest.mark.parametrize("limit", ["soon", "-1", "1.5"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match="give whole seconds, or 0 for no limit"):
        monitoring.watch_for_stalls(collectives.world(), limit)


def test_a_launcher_that_says_no_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "two")
    with pytest.raises(ConfigError, match="HOROVOD_SIZE='two' is no number of ranks"):
        launched_size()


@pytest.mark.parametrize("variable", ["HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_rank_that_has_not_called_init_is_told_so_at_compile(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    inputs = tf.keras.Input([1])
    model = Model(inputs, tf.keras.layers.Dense(1)(inputs))
    monkeypatch.setenv(variable, "1")
    model.compile("sgd", "mse")
    monkeypatch.setenv(variable, "4")
    with pytest.raises(ConfigError, match=r"one of 4 ranks, but gmeta\.init\(\) wasn't called"):
        model.compile("sgd", "mse")


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "one of 2 by mpirun of Open MPI (OMPI_"),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, "one of 3 by an MPI's mpirun (PMI_SIZE=3, PMI_RANK=0)"),
        ({"PMIX_RANK": "1"}, "one of several by a launcher of PMIx (PMIX_RANK=1)"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "one of 2 by srun (SLURM_STEP_NUM_TASKS=2, SLU"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "one of 2 by torchrun (WORLD_SIZE=2, RANK=0)"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"], "chief": ["b:1"]}}'}, "one of 2 tasks of a cluster"),
        # A script of sbatch, a shell of salloc, a single rank of each, and what stands alone.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ""),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, ""),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"WORLD_SIZE": "2"}, ""),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'}, ""),
        # Ranks of gmeta's launcher and of horovodrun meet, wherever it was started.
        ({"GMETA_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, ""),
        ({"HOROVOD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, ""),
    ],
)
def test_a_process_that_was_started_with_others_is_noticed(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], seen: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = place.started_with()
    assert found.startswith(seen)
    if not seen:
        assert found == ""
        return
    with pytest.raises(ConfigError, match=r"gmeta sees one rank.*`gmeta launch --np .*GMETA_RANKS=one"):
        place.check_alone("train a model of its own")
    if place.launched_size() == 1:
        with pytest.raises(ConfigError, match=re.escape(seen)):
            collectives.init()
    collection = EmbeddingCollection([FeatureConfig("item", dim=1)])
    with pytest.raises(ConfigError, match="train a model of its own"), record_lookups():
        collection({"item": tf.constant([1])}, training=True)
    monkeypatch.setenv("GMETA_RANKS", "one")
    assert (place.started_with(), place.launched_size(), place.under_launcher()) == ("", 1, False)
    assert collectives.init().size == 1
    collectives.check_init()


@pytest.mark.parametrize("text", ["worker", "[]", '{"cluster": {"worker": 3}}'])
def test_a_cluster_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigError, match="describes no cluster"):
        collectives.init()


def test_an_error_that_ends_a_rank_comes_first_and_that_of_a_collective_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monitoring.print_errors_first(1, 2)

    def end_by(error: Exception) -> list[str]:
        try:
            raise error from RuntimeError("what led to it")
        except Exception as raised:
            sys.excepthook(type(raised), raised, raised.__traceback__)
        return capsys.readouterr().err.splitlines()

    first, *more = end_by(ConfigError("mend this"))
    assert first == "gmeta: error on rank 1 of 2: mend this"
    assert "RuntimeError: what led to it" in more
    assert more[-1] == "gmeta.core.errors.ConfigError: mend this"
    lost = "gmeta lane: connection closed by rank 0, while rank 1 is in alltoall 'rows'"
    (line,) = end_by(tf.errors.InternalError(None, None, f"{lost}\n\t [[{{{{node gmeta_rows}}}}]]"))
    assert line.startswith(
        "gmeta: error on rank 1 of 2: rank 0 of 1 lost its peers during a step, in gmeta_rows"
    )
    assert lost in line
    assert re.search(rf"; at {re.escape(__file__)}:\d+$", line)
    *_, last = end_by(ValueError("a defect"))
    assert last == "ValueError: a defect"


def test_threads_count_by_the_same_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two, a collective that has ended would seem to be under way for ever."""
    lift = monitoring.lift_variables

    @contextmanager
    def lift_slowly() -> Iterator[None]:
        time.sleep(0.2)
        with lift():
            yield

    monkeypatch.setattr(monitoring, "lift_variables", lift_slowly)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(monitoring.starts, ["of this test"] * 4))
    assert len({id(variable) for variable in found}) == 1
