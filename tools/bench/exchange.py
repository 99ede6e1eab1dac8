"""Rows across ranks: what two-stage deduplication saves, compared with an exchange for each feature.

    python tools/bench/exchange.py --json FILE
    python tools/bench/exchange.py --ranks 2 4 --dims 64 256
    python tools/bench/exchange.py --ranks 2 --dims 64 128 256 512 --device gpu
    python tools/bench/exchange.py --ranks 2 --lane
    python tools/bench/exchange.py --ranks 2 --lane --gbit 1 10 25

Ranks are processes on this machine, under Horovod with Gloo. Each draws batches of 4,096 samples with 26
categorical features, ids by Zipf(1.05); ``criteo`` has the vocabularies of the Criteo data set, ``million`` a
million ids each. A step takes keys to their owners, rows back to the positions, the positions' gradients to
the owners, and updates; times are medians over rounds of the slowest rank's.

wire_bytes   what a rank sends to others in a step
step         its time
collectives  its exchanges
scaling      throughput of 2 ranks over twice that of one, with a sleep of 200 ms in each step instead of the
             model's computation, for which two ranks on few cores would compete

pipeline     a collective of a kilobyte a rank, or of what the name says, by gmeta's lanes beside Horovod;
             small ones are tens in a function, whose call would take as long as they do; tensors are on
             GPUs where each rank has one, else in host memory; with ``--gbit``, each rank has its own
             machine: a namespace, joined by wires of that many 10^9 bits a second

TFRA's layer itself runs where tensorflow-recommenders-addons is installed. Each rank is pinned to its own
cores, equally many for any number of ranks, if there are enough.

with ``none``: no deduplication, ``stage1``: a sender's keys are distinct, ``stage2``: an owner reads each row
once, ``both``; and ``per_feature``: exchanges for each feature, of both stages, as in TFRA's
HvdAllToAllEmbedding; features run in parallel as far as TensorFlow and Horovod allow.

A model of time and bytes, t(N) = local max(1, N / cores) + calls latency(N) + bytes(N) / bandwidth(N), is
checked against the measured steps, and drawn up to 128 ranks (``--plot FILE``), each with its own cores. The
JSON's first object has what was measured; ``--found JSON`` reads it again, for example to draw on another
machine.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from support.hosts import why_no_rack

from harness import Result, parser, report
from parts.exchange.wire_model import WireModel, plot
from parts.jobs import run_job

NO_DEDUPLICATION, EACH_FEATURE = "no deduplication", "an exchange for each feature"
TFRA = "TFRA HvdAllToAllEmbedding"


def measure(ranks: int, settings: dict[str, Any]) -> Any:
    """What a job of this many ranks measured; see parts/exchange/rank.py."""
    with tempfile.TemporaryDirectory() as folder:
        return run_job("exchange.rank", ranks, settings, Path(folder) / "found.json")


def beside_horovod(ranks: list[int], rounds: int, smoke: bool, gbit: float | None = None) -> list[Result]:
    """The lanes beside Horovod, of tensors on GPUs where each rank has one."""
    wire = "" if gbit is None else f"/{gbit:g}Gbit"
    sizes = {"": 1 << 10} if smoke else {"": 1 << 10, "/64kB": 1 << 16, "/1MB": 1 << 20, "/16MB": 1 << 24}
    results = []
    for size in ranks[1:]:
        with tempfile.TemporaryDirectory() as folder:
            settings, out = {"rounds": rounds, "sizes": sizes}, Path(folder) / "lane.json"
            found = run_job("exchange.lane_rank", size, settings, out, {"GMETA_LANE": "auto"}, gbit)
        for name, one in found.items():
            for lane in (each for each in ("nccl", "tcp") if each in one):
                figure, peer = 1e3 * one[lane], 1e3 * one["horovod"]
                results.append(
                    Result(f"pipeline/{name}/{lane}/np{size}{wire}", figure, "ms", "Horovod", peer)
                )
    return results


def results_of(ranks: int, found: dict[str, Any]) -> list[Result]:
    """A job's figures."""
    results = []
    for case, ways in found["ways"].items():
        for way, figures in ways.items():
            name = f"{way}/{case}/np{ranks}"
            none, each = ways["none"], ways["per_feature"]
            if way == "tfra":
                continue
            if way != "none":
                peers = (NO_DEDUPLICATION, none["bytes"])
                results.append(Result(f"exchange/wire_bytes/{name}", figures["bytes"], "bytes", *peers))
            peer = (NO_DEDUPLICATION, 1e3 * none["seconds"])
            if way == "both":
                peer = (EACH_FEATURE, 1e3 * each["seconds"])
                tfra = 1e3 * ways["tfra"]["seconds"] if "tfra" in ways else None
                results.append(Result(f"exchange/step/{name}", 1e3 * figures["seconds"], "ms", TFRA, tfra))
            results.append(Result(f"exchange/step/{name}", 1e3 * figures["seconds"], "ms", *peer))
            results.append(Result(f"exchange/collectives/{name}", figures["collectives"], "calls"))
    return results


def main() -> None:
    """Run the jobs, one number of ranks after another."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--dims", type=int, nargs="+", default=[64, 256])
    options.add_argument("--ids", nargs="+", default=["criteo", "million"], choices=["criteo", "million"])
    options.add_argument("--batch", type=int, default=4096)
    options.add_argument(
        "--device",
        default="cpu",
        choices=["cpu", "gpu"],
        help="where the tables are, and messages are made (default: %(default)s)",
    )
    options.add_argument("--lane", action="store_true", help="measure only the lane beside Horovod")
    options.add_argument("--gbit", type=float, nargs="+", help="with --lane: over wires of these rates")
    options.add_argument("--plot", type=Path, help="draw time and bytes against ranks into this PNG")
    options.add_argument("--found", type=Path, help="measure nothing, read the figures of this JSON")
    given = options.parse_args()
    settings = {
        "rounds": given.rounds,
        "batch": given.batch,
        "dims": given.dims,
        "device": given.device,
        "ids": given.ids,
        "wire": [1 << 10, 1 << 20, 1 << 23, 1 << 25],
        "compute": 0.2,
        "cores": os.cpu_count() or 1,
    }
    ranks = sorted({1, *given.ranks})
    if given.smoke:
        settings |= {"batch": 64, "dims": [8], "ids": ["tiny"], "wire": [1 << 10, 1 << 16], "compute": 0.01}
        ranks = [1, 2]
    if given.gbit and (why := why_no_rack()):
        raise SystemExit(f"--gbit: {why}")
    if given.lane or given.gbit:
        wires = given.gbit or [None]
        results = [one for gbit in wires for one in beside_horovod(ranks, given.rounds, given.smoke, gbit)]
        report("exchange", results, given.json)
        return
    if given.found:
        about = json.loads(given.found.read_text())[0]
        settings, found = about["settings"], {int(size): jobs for size, jobs in about["found"].items()}
        ranks = sorted(found)
    else:
        settings["cores_a_rank"] = settings["cores"] // ranks[-1]
        found = {size: measure(size, settings) for size in ranks}
    results = [result for size in ranks if size > 1 for result in results_of(size, found[size])]
    if not given.found:
        results += beside_horovod(ranks, given.rounds, given.smoke)
    for size in ranks[1:]:
        share = found[1]["scaling"] / found[size]["scaling"]
        results.append(Result(f"exchange/scaling/np{size}", share, "of ideal"))
    model = WireModel.fit({size: found[size]["wire"] for size in ranks if size > 1})
    for size in ranks[1:]:
        for case, ways in found[size]["ways"].items():
            for way in ("none", "both", "per_feature"):
                own = ways[way]
                guess = model.seconds(
                    found[1]["ways"][case][way]["seconds"],
                    own,
                    size,
                    settings["cores"] // max(settings["cores_a_rank"], 1),
                )
                name = f"exchange/model/{way}/{case}/np{size}"
                results.append(Result(name, 1e3 * guess, "ms", "measured", 1e3 * own["seconds"]))
    latency = {size: 1e3 * seconds for size, seconds in model.latency.items()}
    report("exchange", results, given.json, settings=settings, latency_ms=latency, found=found)
    if given.plot:
        case = next(iter(found[1]["ways"]))
        plot(given.plot, case, {size: f["ways"][case] for size, f in found.items()}, model)


if __name__ == "__main__":
    main()
