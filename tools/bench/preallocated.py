"""A growing table compared with a preallocated one that has a sorted map of ids: memory, rates and limits.

    python tools/bench/preallocated.py --json FILE
    python tools/bench/preallocated.py --device gpu --json FILE         (with PyTorch, by the C interface)

The peer is our own form of TorchRec's Managed Collision Handling, the peer of MTGenRec's table 4; it isn't
that library. parts/preallocated/numpy_form.py describes it, torch_form.py is the same on a GPU. It makes all
of its rows at the start, and ids wait for a row for up to --interval batches; our table makes a row when its
id first comes. Both have rows of --dim times 1, 8 and 64 numbers and Adagrad, and make the ids of a batch
distinct themselves. Ids follow Zipf's law with 1.05.

roomy   the preallocated table has more rows than there are ids, as it must if the number of ids is unknown
full    it has a tenth as many; our table has the same bound, and both evict the least frequently used

rate         ids a second that are found or inserted, and trained; medians of rounds of --interval batches
rows         rows a second that this trains: in the preallocated table, ids that wait have no row to train
start, then  bytes at the start, and after the rounds
needed, fit  bytes that the preallocated table takes, and rows that nine tenths of the free memory hold

If the preallocated table doesn't fit there beside ours, it is absent.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from support.gpu.cuda_library import why_missing  # noqa: E402

from harness import Result, interleave, parser, report  # noqa: E402
from parts.tiers.zipf import Zipf  # noqa: E402

PEER = "preallocated (our form of MCH)"
FACTORS = (1, 8, 64)
_SKEW, _FREE_SHARE = 1.05, 0.9
_SIZES: dict[str, dict[str, int]] = {
    "cpu": {"capacity": 4_000_000, "ids": 1_000_000, "batch": 65_536},
    "gpu": {"capacity": 16_000_000, "ids": 4_000_000, "batch": 262_144},
}


def measure(given: Namespace, place: ModuleType, form: str, dim: int) -> list[Result]:
    """Measure rows of one width."""
    capacity = given.capacity if form == "roomy" else given.ids // 10
    needed, free = bytes_needed(capacity, dim), _FREE_SHARE * place.free_bytes()
    contenders = {"own": place.Own(dim, None if form == "roomy" else capacity)}
    if needed + bytes_needed(min(capacity, given.ids), dim) < free:
        contenders["peer"] = place.Peer(capacity, dim, given.interval)
    start = {name: table.bytes() for name, table in contenders.items()}
    draw = Zipf(given.ids, _SKEW, 0)
    rates = rates_of(given, place, draw, dim, contenders)
    then = {name: table.bytes() for name, table in contenders.items()}
    about = f"{given.device}/{form}/dim{dim}"
    distinct = place.distinct(place.batch(draw_keys(draw, given.batch)))
    rows = {"own": rates["own"] * len(distinct) / given.batch}
    if "peer" in contenders:
        found = float(contenders["peer"].find(distinct)[1].sum())
        rows["peer"] = rates["peer"] * found / given.batch
    return [
        Result(f"preallocated/rate/{about}", rates["own"], "ids/s", PEER, rates.get("peer")),
        Result(f"preallocated/rows/{about}", rows["own"], "rows/s", PEER, rows.get("peer")),
        Result(f"preallocated/start/{about}", start["own"], "B", PEER, start.get("peer")),
        Result(f"preallocated/then/{about}", then["own"], "B", PEER, then.get("peer")),
        Result(f"preallocated/needed/{about}", needed, "B"),
        Result(f"preallocated/fit/{about}", int(free / needed * capacity), "rows"),
    ]


def rates_of(
    given: Namespace, place: ModuleType, draw: Zipf, dim: int, contenders: Mapping[str, Any]
) -> dict[str, float]:
    """Return the ids a second of each contender, by rounds in turn on the same batches."""
    gradient = place.gradient(given.batch, dim)
    batches: list[Any] = []

    def draws(_: int) -> None:
        batches[:] = [place.batch(draw_keys(draw, given.batch)) for _ in range(given.interval)]

    def steps(table: Any) -> None:
        for ids in batches:
            table.step(ids, gradient)
        place.wait()

    runs = {name: lambda _, table=table: steps(table) for name, table in contenders.items()}
    seconds = interleave({"draws": draws, **runs}, rounds=given.rounds)
    return {name: given.interval * given.batch / seconds[name] for name in contenders}


def bytes_needed(capacity: int, dim: int) -> int:
    """Return what a preallocated table takes: 24 bytes a row of its map, the row, and its sums of squares."""
    return capacity * (3 * 8 + 2 * 4 * dim)


def draw_keys(draw: Zipf, size: int) -> np.ndarray:
    """Draw ids that are spread over all of int64."""
    return (draw.ids(size).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def main() -> None:
    """Measure all widths."""
    options = parser(__doc__)
    options.add_argument("--device", choices=list(_SIZES), default="cpu", help="(default: %(default)s)")
    options.add_argument(
        "--dim", type=int, default=16, help="width of a row, times the factor (default: %(default)s)"
    )
    options.add_argument("--factors", type=int, nargs="+", default=FACTORS, help="(default: 1 8 64)")
    options.add_argument("--capacity", type=int, help="rows of the roomy table (default: the device's)")
    options.add_argument("--ids", type=int, help="number of ids (default: the device's)")
    options.add_argument("--batch", type=int, help="ids of a batch (default: the device's)")
    options.add_argument(
        "--interval", type=int, default=8, help="batches between merges (default: %(default)s)"
    )
    given = options.parse_args()
    for name, size in _SIZES[given.device].items():
        setattr(given, name, getattr(given, name) or size)
    if given.smoke:
        given.__dict__ |= {"capacity": 4_000, "ids": 2_000, "batch": 500, "interval": 2, "factors": [1, 8]}
    facts = {name: getattr(given, name) for name in ("dim", "capacity", "ids", "batch", "interval")}
    results: list[Result] = []
    if given.device == "gpu":
        absent = why_missing() if importlib.util.find_spec("torch") else "PyTorch isn't installed"
        if absent is not None:
            results.append(Result("preallocated/gpus", 0, "GPUs"))
            report(f"Not measured: {absent}", results, given.json)
            return
        import torch

        facts["gpu"] = torch.cuda.get_device_name()
    place = importlib.import_module(f"parts.preallocated.on_{given.device}")
    try:
        for form in ("roomy", "full"):
            for factor in given.factors:
                results += measure(given, place, form, given.dim * factor)
                gc.collect()
                print(f"{form}, {given.dim * factor} numbers a row: measured", flush=True)
    finally:  # also what there is when it is interrupted
        report("Preallocated tables", results, given.json, **facts)


if __name__ == "__main__":
    main()
