"""The soak runs, kills, and ends equal; and it sees a difference."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from support import warm

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "dev"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    yield importlib.import_module("soak")
    for path in TOOLS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.slow
def test_a_short_soak_passes(tmp_path):
    words = [sys.executable, TOOLS / "soak.py", "--minutes", "0.05", "--seed", "1", "--folder", tmp_path]
    run = warm.run(words)
    assert run.returncode == 0, run.stdout + run.stderr
    *_, summary = run.stdout.splitlines()
    assert summary.startswith("soak: passed: ")
    assert "on 16 tables" in summary
    assert " 0 saves" not in summary


def test_every_difference_is_said(soak):
    reference = soak.Reference(seed=2)
    for _ in range(3):
        reference.step()

    def found():
        arrays = {}
        for name, (_, model, _) in reference.tables.items():
            keys = sorted(model.records)
            arrays[f"{name}/keys"] = np.array(keys)
            arrays[f"{name}/step"] = np.array(model.step)
            arrays[f"{name}/half_rows"] = np.array(model.half_rows())
            for part, attribute in (("rows", "row"), ("slots", "slots")):
                values = [getattr(model.records[key], attribute) for key in keys]
                arrays[f"{name}/{part}"] = np.array(values, np.float32)
            for part in ("frequency", "last_step"):
                arrays[f"{name}/{part}"] = np.array([getattr(model.records[key], part) for key in keys])
        return arrays

    assert soak.compare(reference, found()) == []
    for name, change in (("rows", 2**-20), ("frequency", 1), ("keys", 1), ("step", 1), ("half_rows", 1)):
        arrays = found()
        arrays[f"whole/plain/{name}"].flat[-1:] += arrays[f"whole/plain/{name}"].dtype.type(change)
        (difference,) = soak.compare(reference, arrays)
        assert difference.startswith(f"whole/plain: {name} differs in 1 of ")
    arrays = found()
    arrays["sharded/adagrad/rows"] = arrays["sharded/adagrad/rows"][:-1]
    (difference,) = soak.compare(reference, arrays)
    assert "sharded/adagrad: rows has shape" in difference
