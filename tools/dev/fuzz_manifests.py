"""Reads manifests of checkpoints and of prepared data sets whose structure is systematically damaged.

`support.manifest_damage` has the rule. Manifests that break it are kept in ``--out`` and named; ``--seed``
and the case's number reproduce them. TensorFlow is not loaded.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from support.manifest_damage import Case, checkpoint_case, damage, data_set_case, with_digest


def main() -> int:
    """Try cases until time is up, and return 1 if one broke the rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    tried, read, broken = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        cases = (checkpoint_case(Path(folder, "checkpoints")), data_set_case(Path(folder, "data")))
        while time.monotonic() < until:
            case = cases[tried % len(cases)]
            content = with_digest(damage(case.manifest, random.Random(f"{given.seed} {tried}")))
            try:
                read += case.holds(content)
            except AssertionError as error:
                broken += 1
                print(f"manifests, case {tried} of seed {given.seed}: {error}", file=sys.stderr)
                keep(given.out, case, tried, content)
            tried += 1
    print(json.dumps({"manifests": tried, "read": read, "broke the rule": broken}))
    return int(broken > 0)


def keep(folder: Path, case: Case, number: int, content: bytes) -> None:
    """Keep a manifest that broke the rule."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"manifest-{case.name}-{number}.json").write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
