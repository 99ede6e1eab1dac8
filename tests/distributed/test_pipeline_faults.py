"""A rank is lost in the midst of a pipelined step: at whatever stage, the others end and name it.

The tables have rows on a drive, and no file is left of them.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from pathlib import Path

import pytest
import tensorflow as tf

import gmeta
from gmeta.core import collectives
from gmeta.core.errors import CollectiveError, RanksError
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.ops.device import VARIABLE
from support.gpu.cuda_library import count_gpus_apart
from support.pipeline_runs import own_data
from support.process_ranks import run_ranks
from support.tables import small_tiers
from support.timed_fits import STAGES, act_at_stage

pytestmark = pytest.mark.ranks
PATIENCE = "10"  # seconds that a rank waits for a stopped one; a busy machine keeps others waiting too
ENVIRONMENT = {
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": PATIENCE,
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "15",  # as the rank ends, Horovod waits for the stopped one too
}

GPU = pytest.param("gpu", marks=pytest.mark.skipif(count_gpus_apart() < 2, reason="needs 2 GPUs"))
LANE = {"cpu": "tcp", "gpu": "auto"}
LOST = {
    "SIGKILL": {"cpu": "connection closed by rank 1", "gpu": "connection closed by rank 1"},
    "SIGSTOP": {
        "cpu": f"timed out: rank 1 did not come within {PATIENCE} s",
        "gpu": "(timed out: rank 1 did not come|.*has waited)",  # in TCP's words or NCCL's
    },
}

# (signal, stage, pipeline)
# Quick: the stage with most in flight.
CASES = [
    ("SIGKILL", "gradients", gmeta.Pipeline(depth=1, micro_batches=2)),
]
if "GMETA_ALL_CASES" in os.environ:
    PIPELINES = [gmeta.Pipeline(1), gmeta.Pipeline(2), gmeta.Pipeline(1, micro_batches=2)]
    SIGNALS = ["SIGKILL", "SIGSTOP"]
    CASES = [(name, stage, each) for name in SIGNALS for stage in STAGES for each in PIPELINES]


def train(name: str, stage: str, pipeline: gmeta.Pipeline, folder: Path) -> None:
    """Runs on every rank: rank 1 gets a signal at a stage; another writes how long it then went on."""

    def act() -> None:
        (folder / "when").write_text(str(time.time()))
        os.kill(os.getpid(), signal.Signals[name])

    if collectives.world().rank == 1:
        act_at_stage(stage, 10, act)
    item = tf.keras.Input([], name="item", dtype=tf.int64)
    tiers = small_tiers(folder / "rows")
    rows = EmbeddingCollection([FeatureConfig("item", TableConfig("item", 4))], tiers=tiers)({"item": item})
    model = Model({"item": item}, tf.keras.layers.Dense(1)(rows["item"]))
    model.compile("sgd", "mse", pipeline=pipeline)
    batches = [({"item": tf.range(n, n + 8, dtype=tf.int64)}, tf.ones([8, 1])) for n in range(30)]
    try:
        model.fit(own_data(lambda: iter(batches)), verbose=0)
    except CollectiveError:
        seconds = time.time() - float((folder / "when").read_text())
        (folder / "seconds").write_text(f"{seconds:.1f}")
        raise


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(("name", "stage", "pipeline"), CASES, ids=str)
@pytest.mark.shown_by("distributed/test_lane.py::test_a_killed_rank_is_named")
def test_a_lost_rank_is_named(
    name: str,
    stage: str,
    pipeline: gmeta.Pipeline,
    device: str,
    tmp_path: Path,
) -> None:
    killed = name == "SIGKILL"
    with pytest.raises(RanksError) as caught:
        run_ranks(
            *(train, 2, name, stage, pipeline, tmp_path),
            environment={**ENVIRONMENT, "GMETA_LANE": LANE[device], VARIABLE: device},
            grace=60 if killed else 5,
        )
    said = str(caught.value)
    reason = "was killed by SIGKILL" if killed else "hung: the others waited for it in a collective"
    assert said.startswith(f"the job was ended: rank 1 of 2 {reason}"), said
    assert "\nrank 0 ended with exit code 1\n" in said  # by itself
    lost = rf"rank 0 of 2 lost its peers during fit, in gmeta_\S+: gmeta lane: {LOST[name][device]}"
    assert re.search(lost, said), said
    seconds = float((tmp_path / "seconds").read_text())
    logging.getLogger(__name__).info("the error came %.1f s after the signal", seconds)
    assert list((tmp_path / "rows").iterdir()) == []
    assert seconds <= 60  # what docs/ranks.md promises
