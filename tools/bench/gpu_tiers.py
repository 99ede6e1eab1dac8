"""Tables larger than a GPU's memory: rows there and in host memory, which are brought before their step.

    python tools/bench/gpu_tiers.py --json FILE
    python tools/bench/gpu_tiers.py --part step --skews 1.2 --json FILE

Parts run in separate processes; after each figure the file has all figures so far:

hits    percent of a batch's distinct keys that the GPU's memory held, by the share of rows there and Zipf's
        exponent; the peer is Che's approximation of a least-recently-used cache
step    a table's steps: rows of the batch after next are brought, find or insert, products of matrices of
        --compute milliseconds, update by Adam. The bound (peer) is 1.05 * max(the step with all rows in the
        GPU's memory, 1.25 * bytes moved / bus), where bus is the rate of copies both ways at once, measured
        in the same run, and bytes moved are those of rows brought and sent back, weights and both moments
hstu    steps of HSTU, 512 x 3, with 10% of the rows in the GPU's memory, by Zipf's law with 1.05: times a
        step with all rows there; beside rows brought just before their own step, none brought (kernels read
        them over the bus), and a table in host memory. exposed: percent of a step beyond that of the same
        model on rows that are already there
drive   the same step with a tenth of the rows in the GPU's memory and half of them on a drive, under the
        folder for temporary files. The bound (peer) is 1.05 * max(the step with all rows in the GPU's memory,
        reads of a step / the drive's rate of random reads of 4 KiB, by threads of Python). late: without
        prefetches. Steps are means: some send rows to the drive, and wait for it. amplification: bytes
        written for each byte of a row that goes to the drive, without prefetches
shapes  lookup and update of batches as large as in 9N-LLM's table 1, beside the paper's milliseconds on its
        own GPUs; parts/tiers/gpu_shapes.py states the assumptions

Caches are warmed by untimed batches: twice as many as an id stays by Che's approximation, --warm at most. All
contenders take the same batches in turn (drive: other batches of the same law); values are medians. hits,
step, drive and shapes require PyTorch and no TensorFlow, hstu the opposite. Without a GPU, nothing is
measured; --smoke then runs hstu with rows in memory over a drive.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from support.gpu.cuda_library import why_missing  # noqa: E402

from harness import Result, parser, report, write  # noqa: E402
from parts.notes import Notes, gpu  # noqa: E402

PARTS = {
    "hits": "gpu_hits",
    "step": "gpu_step",
    "hstu": "hstu_step",
    "drive": "gpu_drive",
    "shapes": "gpu_shapes",
}
_SIZES: dict[str, dict[str, Any]] = {
    "hits": {"rows": 4_000_000, "batch": 16_384, "caches": [1, 2, 5, 10, 20]},
    "step": {"rows": 40_000_000, "batch": 1 << 19, "caches": [10]},
    "hstu": {"rows": 4_000_000, "batch": 65_536, "caches": [10]},
    "drive": {"rows": 8_000_000, "batch": 65_536, "caches": [10]},
    "shapes": {"rows": 24_000_000, "batch": 0, "caches": [10]},
}
_SMALL: dict[str, dict[str, Any]] = {
    "hits": {"rows": 20_000, "batch": 1_000, "warm": 20, "caches": [10]},
    "step": {"rows": 200_000, "batch": 8_192, "warm": 12, "compute": 0.5},
    "hstu": {"rows": 20_000, "batch": 1_500, "warm": 4},
    "drive": {"rows": 200_000, "batch": 8_192, "warm": 12, "compute": 0.5},
    "shapes": {"rows": 200_000, "batch": 8_192, "warm": 6, "compute": 0.5},
}


def measure(part: str, given: Namespace) -> Notes:
    """Measure a part in this process."""
    sizes = {name: size for name, size in _SIZES[part].items() if getattr(given, name) is None}
    given = Namespace(**(vars(given) | sizes | (_SMALL[part] if given.smoke else {})))
    names = ("rows", "batch", "caches", "skews", "warm", "compute", "rounds")
    notes = Notes(given.json, {"gpu": gpu(), part: {name: getattr(given, name) for name in names}})
    if (absent := why_absent(part, given)) is not None:
        print(f"{part}: not measured: {absent}")
        notes(Result(f"tiers/{part}/gpus", 0, "GPUs"))
        return notes
    importlib.import_module(f"parts.tiers.{PARTS[part]}").measure(given, notes)
    return notes


def why_absent(part: str, given: Namespace) -> str | None:
    """Return why a part can't be measured here, or None if it can."""
    if part == "hstu" and given.smoke:
        return None
    if part != "hstu" and importlib.util.find_spec("torch") is None:
        return "PyTorch isn't installed"
    return why_missing()


def measure_apart(given: Namespace) -> tuple[list[Result], dict[str, Any], list[str]]:
    """Measure parts in separate processes; return the figures, the facts, and which parts failed."""
    results: list[Result] = []
    facts: dict[str, Any] = {}
    failed = []
    words = _without_parts(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        for part in given.part:
            file = Path(folder) / f"{part}.json"
            command = [sys.executable, __file__, *words, "--part", part, "--json", str(file)]
            print(f"{part}:", flush=True)
            if subprocess.run(command).returncode != 0:
                failed.append(part)
            if file.is_file():
                about, *found = json.loads(file.read_text())
                facts |= {name: about[name] for name in ("gpu", part)}
                results += [_result_of(each) for each in found]
            if given.json:
                write(given.json, results, **facts)
    return results, facts, failed


def _without_parts(words: Sequence[str]) -> list[str]:
    left, of_parts = [], False
    for word in words:
        of_parts = word == "--part" or (of_parts and word in PARTS)
        left += [] if of_parts else [word]
    return left


def _result_of(found: dict[str, Any]) -> Result:
    return Result(*(found.get(name) for name in ("name", "value", "unit", "peer", "peer_value")))


def main() -> None:
    """Measure the requested parts."""
    options = parser(__doc__)
    options.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all)")
    options.add_argument("--rows", type=int, help="of a table (default: the part's)")
    options.add_argument("--batch", type=int, help="keys or tokens (default: the part's)")
    options.add_argument("--caches", type=int, nargs="+", help="%% of the rows (default: the part's)")
    options.add_argument("--skews", type=float, nargs="+", default=[0.9, 1.05, 1.2], help="of Zipf's law")
    options.add_argument("--warm", type=int, default=3000, help="batches at most (default: %(default)s)")
    options.add_argument("--compute", type=float, default=10, help="milliseconds (default: %(default)s)")
    given = options.parse_args()
    failed: list[str] = []
    if len(given.part) == 1:
        notes = measure(given.part[0], given)
        results, facts = list(notes.results.values()), notes.facts
    else:
        results, facts, failed = measure_apart(given)
    report("Tiers on a GPU", results, given.json, **facts)
    if failed:
        raise SystemExit(f"these parts failed: {', '.join(failed)}; the others are measured")


if __name__ == "__main__":
    main()
