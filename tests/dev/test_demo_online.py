"""`make demo-online`, with few events in a few seconds."""

import json
import sys
from pathlib import Path

import pytest

from support import warm

DEMO = Path(__file__).resolve().parents[2] / "tools" / "dev" / "demo_online.py"


@pytest.mark.slow
def test_the_demo_trains_serves_and_shows(tmp_path):
    words = [sys.executable, DEMO, str(tmp_path), "--events", "200", "--seconds", "4"]
    run = warm.run(words, cwd=DEMO.parents[2])
    assert run.returncode == 0, run.stderr
    for name in ("each second", "2 hours", "6 hours", "day", "never", "true probabilities"):
        assert f"\n{name} " in run.stdout
    assert (tmp_path / "freshness.png").stat().st_size > 1000
    found = json.loads((tmp_path / "freshness.json").read_text())
    assert all(0 < each["auc"] < 1 for each in found["day"].values())
    assert len(found["auc_by_hour"]["day"]) == 24
