"""Ranks export a table together, to the bytes of its checkpoint, and import it, each what it owns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta import checkpoint
from gmeta.checkpoint.callback import tables_by_name
from gmeta.checkpoint.sharded import save
from gmeta.core import collectives
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.optimizers import Adam
from support.process_ranks import run_ranks
from support.tables import sorted_records

pytestmark = pytest.mark.ranks


def collection() -> EmbeddingCollection:
    features = [FeatureConfig(name, dim=2) for name in ("user", "item")]
    return EmbeddingCollection(features, optimizer=Adam(0.1), name="tables")


def work(folder: Path) -> dict[str, Any]:
    tables, again, place = collection(), collection(), collectives.world().rank
    found = tables.lookup({name: np.arange(200) + 100 * place for name in ("user", "item")})
    tables.apply_gradients(found, [tf.ones_like(rows) for rows in found.rows])
    save(folder / "ck", tables_by_name(tables))
    rows = checkpoint.export_table(tables, "item", folder / "item", state=True).description.rows
    done = checkpoint.import_table(again, "item", folder / "item", state=True)
    refused = ""
    try:
        checkpoint.export_table(tables, "item", folder / "item")
    except Exception as error:
        refused = str(error)
    return {"rows": rows, "own": done.own, "again": sorted_records(again.tables[0]), "refused": refused}


@pytest.mark.shown_by(
    "checkpoint/test_table_export.py::test_ranks_write_the_bytes_that_one_writes_and_import_what_they_own"
)
def test_two_ranks_export_what_the_checkpoint_has_and_import_what_they_own(tmp_path):
    ranks = run_ranks(work, 2, tmp_path)
    checkpoint.export_table(tmp_path / "ck", "item", tmp_path / "saved", state=True)
    for path in (tmp_path / "saved").iterdir():
        assert (tmp_path / "item" / path.name).read_bytes() == path.read_bytes()
    assert [each["rows"] for each in ranks] == [300, 300]
    assert sum(each["own"] for each in ranks) == 300
    for each in ranks:
        assert len(each["again"]["keys"]) == each["own"] > 0
        assert int(each["again"]["step"]) == 1
        assert "rank 0 of 2" in each["refused"]
        assert "exists already" in each["refused"]
