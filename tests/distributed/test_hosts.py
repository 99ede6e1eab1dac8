"""Ranks on several machines: namespaces with a slow network between them, under either launcher."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.lane import lane_kind
from gmeta.core.errors import RanksError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.optimizers import Adagrad
from support.hosts import Rack, rack, start_ranks, wait_for_ranks, why_no_rack
from support.process_ranks import rank_command, ranks_environment, results
from support.tables import sorted_records

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(why_no_rack()), reason=why_no_rack())]
TCP = {"GMETA_LANE": "tcp"}
STEPS, SAMPLES = 6, 12


def train() -> dict[str, Any]:
    """This rank's rows, and all dense weights, after the steps on its part of the same global batches."""
    here = collectives.world()
    table = TableConfig("item", 4, initializer=Normal(0.0, 0.3))
    collection = EmbeddingCollection([FeatureConfig("item", table)], optimizer=Adagrad(0.1))
    x = {"item": tf.keras.Input([], name="item", dtype=tf.int64)}
    kernel = tf.keras.initializers.GlorotUniform(seed=1)
    model = Model(x, tf.keras.layers.Dense(1, kernel_initializer=kernel)(collection(x)["item"]))
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    drawn = np.random.default_rng(5)
    part = slice(here.rank * SAMPLES // here.size, (here.rank + 1) * SAMPLES // here.size)
    for _ in range(STEPS):
        ids, labels = np.minimum(drawn.zipf(1.3, SAMPLES), 40), drawn.normal(size=[SAMPLES, 1])
        model.train_on_batch({"item": tf.constant(ids[part], tf.int64)}, labels[part].astype(np.float32))
    (own,) = collection.tables
    records = sorted_records(own)
    return {
        "lane": lane_kind(),
        "host": platform.node(),
        "rows": dict(zip(records["keys"].tolist(), records["rows"].tolist(), strict=True)),
        "dense": [weight.numpy() for weight in model.trainable_weights],
    }


def exchange(floats: int) -> str:
    """One all-to-all."""
    here = collectives.world()
    rows, splits = tf.zeros([floats]), tf.fill([here.size], floats // here.size)
    collectives.alltoall(rows, splits, name="rows")
    return lane_kind()


def exchange_and_train() -> dict[str, Any]:
    exchange(1 << 20)
    return train()


def run_in(
    machines: Rack,
    folder: Path,
    function: Callable[..., Any],
    *args: Any,
    own: bool = False,
    **environment: str,
) -> Any:
    """Start a function as the ranks of a rack that the test keeps hold of; by ``own``, without Horovod."""
    return start_ranks(
        machines,
        rank_command(function, args, folder),
        environment=ranks_environment({**TCP, **environment}),
        own=own,
    )


def meet() -> tuple[Any, ...]:
    """Exchange with the other host, from two threads; say what a rank knows of itself and what it has."""
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(collectives.allgather_objects, platform.node()).result()
    return (
        exchange(64),
        told,
        collectives.world(),
        os.environ["GIVEN"],
        "horovod" in sys.modules,
        str(Path.cwd()),
    )


def test_gmetas_launcher_starts_ranks_on_hosts_without_horovod(tmp_path: Path) -> None:
    with rack(2) as machines:
        job = run_in(machines, tmp_path, meet, own=True, GIVEN="a b'c")
        wait_for_ranks(machines, job, timeout=300)
        said = (machines.folder / "launcher").read_text()
    names = ["host0", "host1"]
    here = str(Path.cwd())
    for rank, found in enumerate(results(tmp_path, 2)):
        assert found == ("tcp", names, collectives.World(rank, 2, 0), "a b'c", False, here)
    assert "Fatal" not in said


def test_a_host_that_cannot_be_reached_ends_the_job(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "ssh: no route to $1" >&2\nexit 255\n')
    ssh.chmod(0o755)
    command = [sys.executable, "-m", "gmeta", "launch", "--hosts", "far:1,away:1", "--ssh", str(ssh), "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search(r"was lost with (far|away), .*exit code 255.*: ssh: no route to \1", done.stderr)


@pytest.mark.horovod
@pytest.mark.shown_by("test_gmetas_launcher_starts_ranks_on_hosts_without_horovod")
def test_two_hosts_learn_what_one_rank_learns_over_the_shaped_wire(tmp_path: Path) -> None:
    with rack(2, gbit=1) as machines:
        wait_for_ranks(machines, run_in(machines, tmp_path, exchange_and_train), timeout=300)
        for host in machines.hosts:
            told = host.run("tc", "-s", "qdisc", "show", "dev", "eth0")
            assert "tbf" in told
            assert "rate 1Gbit" in told
            (sent,) = re.findall(r"Sent (\d+) bytes", told)
            assert int(sent) > 1 << 21  # half of the floats, each 4 bytes
            (late,) = re.findall(r"overlimits (\d+)", told)
            assert int(late) > 0
    alone, found = train(), results(tmp_path, 2)
    assert [rank["lane"] for rank in found] == ["tcp", "tcp"]
    assert [rank["host"] for rank in found] == ["host0", "host1"]
    assert not found[0]["rows"].keys() & found[1]["rows"].keys()
    rows = found[0]["rows"] | found[1]["rows"]
    assert rows.keys() == alone["rows"].keys()
    for key, row in alone["rows"].items():
        np.testing.assert_allclose(rows[key], row, rtol=1e-5, atol=1e-6)
    for rank in found:
        for mine, other in zip(rank["dense"], alone["dense"], strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.horovod
@pytest.mark.shown_by("test_gmetas_launcher_starts_ranks_on_hosts_without_horovod")
def test_containers_of_one_machine_with_one_name_reach_each_other(tmp_path: Path) -> None:
    with rack(2) as machines:
        for host in machines.hosts:
            names = tmp_path / host.name
            names.write_text(f"{(machines.folder / 'hosts').read_text()}{host.address} twin\n")
            host.run("mount", "--bind", names, "/etc/hosts")
            host.run("umount", "/proc/sys/kernel/random/boot_id")
            host.run("sh", "-c", "echo twin > /proc/sys/kernel/hostname")
        wait_for_ranks(machines, run_in(machines, tmp_path, exchange, 64), timeout=120)
    assert results(tmp_path, 2) == ["tcp", "tcp"]


def step_until_the_end(folder: str) -> None:
    """Steps without end; each rank says when it is in its third."""
    here = collectives.world()
    for number in range(10**9):
        if number == 2:
            (Path(folder) / f"steps.{here.rank}").touch()
        with collectives.name_failures("a step"):
            collectives.alltoall(tf.range(here.size), tf.ones([here.size], tf.int32), name="rows")


@pytest.mark.parametrize(
    ("fate", "said", "own"),
    [
        pytest.param(
            "power_off",
            "connection closed by rank 1|timed out: rank 1 did not come",
            False,
            marks=pytest.mark.horovod,
        ),
        ("power_off", "the job was ended: rank 1 of 2 was lost with host1", True),
        pytest.param(
            "unplug",
            "timed out: rank 1 did not come",
            False,
            marks=[pytest.mark.slow, pytest.mark.horovod],
        ),
    ],
)
@pytest.mark.shown_by(
    "core/collectives/test_local_ranks.py::test_a_rank_whose_connection_ends_is_lost_with_its_machine"
)
def test_a_lost_host_ends_the_other(tmp_path: Path, fate: str, said: str, own: bool) -> None:
    with rack(2, gbit=1) as machines:
        limit = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}
        job = run_in(machines, tmp_path, step_until_the_end, str(tmp_path), own=own, **limit)
        while not all((tmp_path / f"steps.{rank}").exists() for rank in (0, 1)):
            assert job.poll() is None, (machines.folder / "launcher").read_text()
            time.sleep(0.05)
        lost = machines.hosts[1]
        lost.power_off() if fate == "power_off" else machines.unplug(lost)
        with pytest.raises(RanksError) as caught:
            wait_for_ranks(machines, job, timeout=100)
    assert re.search(said, str(caught.value))
    assert "the launcher ended" in str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_who_made_the_rack(number: signal.Signals) -> None:
    script = """
import sys, time
from support.hosts import rack
with rack(2, gbit=1) as machines:
    sleeping = machines.hosts[0].start(["sleep", "600"])
    print(machines.head.process, *(host.process for host in machines.hosts), flush=True)
    time.sleep(600)
"""
    maker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert maker.stdout is not None
    first = [int(word) for word in maker.stdout.readline().split()]
    assert len(first) == 3
    assert all(is_running(process) for process in first)
    os.kill(maker.pid, number)
    maker.wait()
    maker.stdout.close()
    while any(is_running(process) for process in first):
        time.sleep(0.02)


def is_running(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
