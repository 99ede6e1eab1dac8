"""Collectives on one rank: the identity, at no cost; and the parts of them that need no second rank."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives import failures, stalls, tensors
from gmeta.core.collectives.place import launched_size
from gmeta.core.errors import CollectiveError, ConfigError
from gmeta.models import Model


@pytest.mark.parametrize("module", ["agreement", "counting", "tensors", "entry"])
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
    explained = failures.explain(tf.errors.InternalError(None, None, two))
    assert "in gmeta_keys: gmeta lane: timed out; another rank" in str(explained)
    other = tf.errors.InvalidArgumentError(None, None, "shapes differ")
    assert failures.explain(other) is None
    with pytest.raises(tf.errors.InvalidArgumentError), collectives.name_failures("a step"):
        raise other


@pytest.mark.parametrize("limit", ["soon", "-1", "1.5"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match="give whole seconds, or 0 for ever"):
        stalls.watch_for_stalls(collectives.world(), limit)


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


def test_an_error_that_ends_a_rank_is_said_in_the_first_line() -> None:
    code = """
from gmeta.core.collectives.driver.first_words import say_errors_first
from gmeta.core.errors import ConfigError
say_errors_first(1, 2)
try:
    raise RuntimeError("Horovod has been shut down")
except RuntimeError as error:
    raise ConfigError("mend this") from error
"""
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    lines = found.stderr.splitlines()
    assert lines[0] == "gmeta: error on rank 1 of 2: mend this"
    assert "Horovod has been shut down" in found.stderr
    assert lines[-1] == "gmeta.core.errors.ConfigError: mend this"
    assert found.returncode == 1
