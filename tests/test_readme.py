"""The README's examples run as they stand there, each in a process and an empty folder of its own."""

import re
import sys
from pathlib import Path

import pytest

from gmeta.testing.jobs import warm
from gmeta.testing.jobs.output_filter import without_stalls

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
# For each example what must hold after it, and what it must have printed.
EXPECTED = [
    ('history["val_mae@5"][-1] < history["val_mae@0"][-1] - 0.03', "after 5 steps on their own ratings: 0."),
    (
        'model.history.history["auc"][-1] > 0.9 and int(embeddings.tables[0].size()) == 198',
        "item, seen (mean) -> item",
    ),
    ("float(loss) < 0.1 and int(items.tables[0].size()) == 3", "loss 0.0"),
    ("gmeta.init().size == 1", ""),
]


@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_an_example_runs(number, tmp_path):
    example, (holds, printed) = EXAMPLES[number], EXPECTED[number]
    assert len(example.strip().splitlines()) <= 30  # it says what gmeta is only while it is short
    run = warm.run([sys.executable, "-c", f"{example}assert {holds}\n"], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert without_stalls(run.stderr) == ""  # no chatter of TensorFlow's
    assert printed in run.stdout


def test_every_example_is_expected_to_do_something():
    assert len(EXAMPLES) == len(EXPECTED)
