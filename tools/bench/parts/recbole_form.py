"""A RecBole model with its defaults, run by the peer's interpreter, which has no gmeta.

    PEER/bin/python tools/bench/parts/recbole_form.py FOLDER TASK MODEL

FOLDER holds a data set's ``.inter``, ``.user`` and ``.item``. TASK is ``retrieval``: all interactions, 8:1:1
by user, the whole catalogue ranked; or ``ranking``: whether a rating is at least 4, 8:1:1 of random rows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # RecBole 1.2.1 loads its own checkpoints by pickle

from recbole.quick_start import run_recbole

SETTINGS = {
    "retrieval": {
        "metrics": ["Recall", "NDCG", "Hit"],
        "topk": [10],
        "valid_metric": "NDCG@10",
    },
    "ranking": {
        "threshold": {"rating": 4},
        "load_col": {
            "inter": ["user_id", "item_id", "rating", "timestamp"],
            "user": ["user_id", "age", "gender", "occupation"],
            "item": ["item_id", "release_year", "class"],
        },
        "normalize_all": True,
        "metrics": ["AUC", "LogLoss"],
        "valid_metric": "AUC",
        "eval_args": {
            "split": {"RS": [0.8, 0.1, 0.1]},
            "order": "RO",
            "group_by": None,
            "mode": "labeled",
        },
        "train_neg_sample_args": None,
    },
}


def main(folder: Path, task: str, model: str) -> None:
    """Train and measure a model, and print the test's metrics and processor seconds as JSON."""
    given = {"data_path": str(folder.parent), "show_progress": False, "seed": 2020, "use_gpu": False}
    found = run_recbole(model=model, dataset=folder.name, config_dict={**given, **SETTINGS[task]})
    took = os.times()
    test = {name: float(value) for name, value in found["test_result"].items()}
    print(json.dumps({"test": test, "seconds": took.user + took.system}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
