"""The README's example runs as it stands there, in a fresh process and an empty folder."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_keras_example_runs(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(example.strip().splitlines()) <= 25  # it says what gmeta is only while it is short
    after = 'assert model.history.history["mae"][-1] < model.history.history["mae"][0]\n'
    run = subprocess.run(
        [sys.executable, "-c", example + after], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""  # no chatter of TensorFlow's
    assert "val_mae" in run.stdout
