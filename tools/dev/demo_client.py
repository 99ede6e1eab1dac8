"""Call an exported model as a server's client does: with TensorFlow alone, without gmeta.

    python tools/dev/demo_client.py serving new_user.json

passes a new user's first rows to ``adapt``, and predicts the others before and after.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

SHOWN = 0.7  # of the new user's rows


def main(base: Path, rows_file: Path) -> None:
    """Print clicks beside predictions."""
    newest = max(base.iterdir(), key=lambda path: int(path.name))
    model = tf.saved_model.load(str(newest))
    rows = json.loads(rows_file.read_text())
    shown, others = rows[: int(SHOWN * len(rows))], rows[int(SHOWN * len(rows)) :]
    adapt, predict, predict_with = (model.signatures[name] for name in ("adapt", "predict", "predict_with"))
    labels = tf.constant([float(row["click"]) for row in shown])
    learned = adapt(**columns(adapt, shown), label=labels)["weights_bytes"]
    before = predict(**columns(predict, others))["click"].numpy()
    after = predict_with(**columns(predict_with, others), weights_bytes=learned)["click"].numpy()
    print(f"a new user, whose first {len(shown)} rows `adapt` was shown: probability of a click")
    print(f"{'item':<10} {'tags':<22} {'price':>8}  {'before':>6}  {'after':>6}  clicked")
    for row, old, new in zip(others, before, after, strict=True):
        tags, clicked = ", ".join(row["tags"]), "yes" if row["click"] else "no"
        print(f"{row['item_id']:<10} {tags:<22} {row['price']:>8.2f}  {old:>6.2f}  {new:>6.2f}  {clicked}")


def columns(signature: Any, rows: list[dict[str, Any]]) -> dict[str, tf.Tensor]:
    """The rows as the signature takes them; lists as a matrix, padded with the empty string."""
    given = {}
    for name, spec in signature.structured_input_signature[1].items():
        if name not in rows[0]:
            continue
        values = [row[name] for row in rows]
        if spec.shape.rank == 2:
            width = max(map(len, values))
            values = [[*each, *[""] * (width - len(each))] for each in values]
        given[name] = tf.constant(values, spec.dtype)
    return given


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
