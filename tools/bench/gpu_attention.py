"""HSTU's attention on the GPU beside its peers in one run, by the library's C interface, without TensorFlow.

    python tools/bench/gpu_attention.py --json FILE

    o_i = s sum_{j <= i} SiLU(alpha q_i k_j) v_j

With `--window W` only j >= i - W are seen. With `--form softmax` a softmax over the same j takes the place of
SiLU.

forward, backward  the outputs; the gradients of q, k and v
Triton             our own kernel in Triton, for jagged sequences like the native one
torch.compile      the same over padded sequences: scores of all pairs and a mask. Padding isn't timed,
                   and is to a multiple of 64
FlexAttention      compiled, over the same jagged sequences with the same pairs. It computes softmax in place
                   of SiLU, so its results aren't comparable, but its products are: it is rated by the same
                   operations in the same time
SDPA               only with softmax, where the peers are FlexAttention and PyTorch's
                   scaled_dot_product_attention by its FlashAttention and by cuDNN: sequences of one length as
                   they are, jagged ones as nested tensors, without padding
rab, times         ours with a relative bias of places and of times, or of times alone, and the gradients of
                   its tables
plan, map          what the native ops prepare, in milliseconds: a plan and, for rab, a map of times, once for
                   all layers, heads and both passes, and not in their times; and the megabytes of the map

131,072 tokens, 4 heads, bfloat16, causal; sequences of one length each, or jagged: lognormal lengths with
a mean of about 600, at most 3,000. Rates count operations of pairs that see one another: 4 * width * heads *
pairs forward, 2.5 times that backward, whatever a peer computes on top. "share" is relative to the rate of a
product of two 8192 x 8192 bfloat16 matrices on the same GPU, measured first. Peers take turns, call by call;
times are by CUDA events, medians of 50 calls after 10 (12 after 3 where a call takes over 25 ms); p10 is the
rate of the fastest tenth. Inputs are random in each run and too large for the cache. Results of those that
compute the same are compared before they are timed. It requires PyTorch with Triton.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from support.gpu.cuda_library import why_missing  # noqa: E402
from support.gpu.gpu_attention import GpuAttention, Table  # noqa: E402

import numpy as np  # noqa: E402
from harness import Result, machine, parser, report  # noqa: E402
from parts.attention.cases import Array, jagged_lengths  # noqa: E402

HEADS = 4
MOST_APART = 1e-2
"""Two results in bfloat16, each 2-5e-3 from the truth: ||a - b|| / ||b||."""
PASSES = {"forward": 1.0, "backward": 2.5}
PEERS = {
    "silu": ("Triton", "torch.compile", "FlexAttention"),
    "softmax": ("FlexAttention", "SDPA FlashAttention", "SDPA cuDNN"),
}
BACKENDS = {"SDPA FlashAttention": "FLASH_ATTENTION", "SDPA cuDNN": "CUDNN_ATTENTION"}


@dataclass(frozen=True)
class Rate(Result):
    """A rate at the median time, and at that of the fastest tenth; ``absent`` says why there is no peer's."""

    p10: float | None = None
    peer_p10: float | None = None
    absent: str | None = None

    def to_json(self) -> dict[str, Any]:
        """With more than other results have, where it is known."""
        more = {name: getattr(self, name) for name in ("p10", "peer_p10", "absent")}
        return super().to_json() | {name: value for name, value in more.items() if value is not None}


def why_absent() -> str | None:
    for name, package in (("torch", "PyTorch"), ("triton", "Triton")):
        if importlib.util.find_spec(name) is None:
            return f"{package} isn't installed"
    return why_missing()


def last_line(error: Exception) -> str:
    """The last line of an error's message."""
    words = [type(error).__name__, *str(error).strip().splitlines()[-1:]]
    return ": ".join(words)[:200]


def apart(one: Any, other: Any) -> float:
    """||one - other|| / ||other||."""
    one, other = one.float(), other.float()
    return float((one - other).norm() / other.norm())


def check(peer: Any, name: str, ours: Any, theirs: Any) -> None:
    """Raise unless a peer's results are ours."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        difference = apart(one, peer.jagged(other) if hasattr(peer, "jagged") else other)
        if not difference < MOST_APART:
            raise AssertionError(f"{name}: result {number} differs from ours by {difference:.3g}")


class Bench:
    """Collects results, and writes them after each case."""

    def __init__(self, given: Any) -> None:
        import torch
        import triton

        self.given, self.runs = given, 3 if given.smoke else 50
        self.tokens = 8192 if given.smoke else 131_072
        self.root = "gpu_attention" if given.form == "silu" else f"gpu_attention/{given.form}"
        self.facts = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "settings": {
                **{"tokens": self.tokens, "heads": HEADS, "dtype": "bfloat16"},
                "mask": "causal" if given.window is None else f"window of {given.window}",
            },
        }
        self.results: list[Result] = []
        self.matmul = self.matmul_rate("before")

    def matmul_rate(self, when: str) -> float:
        """TFLOP/s of a product of matrices."""
        import torch
        from parts.gpu_timing import timed

        size = 1024 if self.given.smoke else 8192
        a, b = (torch.randn((size, size), device="cuda", dtype=torch.bfloat16) for _ in range(2))
        # The first calls run while the GPU's clock rises.
        rounds = [
            timed(lambda _: torch.matmul(a, b), self.runs).p50 for _ in range(1 if self.given.smoke else 5)
        ]
        rate = 2 * size**3 / min(rounds) / 1e12
        self.results.append(Result(f"gpu_attention/matmul/{when}", rate, "TFLOP/s"))
        self.tell(self.results[-1])
        return rate

    def tell(self, result: Result) -> None:
        """Print a line at once, so that a run that is ended early has shown its results."""
        peer = f"{result.peer} {result.peer_value or 0:.0f} ({result.ratio or 0:.2f})" if result.peer else ""
        print(result.name, f"{result.value:.4g} {result.unit}", peer, flush=True)

    def write(self) -> None:
        """Write the results so far, as JSON."""
        if self.given.json:
            self.given.json.parent.mkdir(parents=True, exist_ok=True)
            objects = [{**machine(), **self.facts}, *(result.to_json() for result in self.results)]
            self.given.json.write_text(json.dumps(objects, indent=1) + "\n")

    def peer(self, name: str, inputs: Any, ours: GpuAttention, lengths: Array) -> Any:
        """A peer for these inputs."""
        numbers = (ours.offsets, int(lengths.max()), ours.alpha, ours.scale)
        if name == "Triton":
            from parts.attention.triton_form import TritonAttention

            attention = TritonAttention(*inputs, *numbers)
            attention.compile(threads=12)
            return attention
        if name == "torch.compile":
            from parts.attention.padded_form import PaddedAttention

            return PaddedAttention(*inputs, *numbers)
        if name in BACKENDS:
            from parts.attention.sdpa_form import SdpaAttention

            return SdpaAttention(*inputs, lengths, ours.alpha, BACKENDS[name])
        from parts.attention.flex_form import FlexAttention

        return FlexAttention(*inputs, lengths, ours.alpha, self.given.window)

    def case(self, width: int, name: str, lengths: Array, peers: list[str]) -> None:
        """Both passes of one width and set of sequences."""
        import torch

        seed = int(np.random.default_rng().integers(2**31))
        form = self.given.form
        mask = "causal" if self.given.window is None else self.given.window
        ours = GpuAttention(lengths.tolist(), HEADS, width, "bfloat16", mask, seed, form=form)
        if form == "softmax":
            ours.scale = 1.0
        inputs = [x.contiguous() for x in (ours.q, ours.k, ours.v, ours.of_out)]
        ours.q, ours.k, ours.v, ours.of_out = inputs
        ours.make_plan()
        own = {"forward": ours.forward, "backward": ours.gradients}
        expected = {"forward": (ours.forward(),), "backward": ours.gradients()}
        made: dict[str, Any] = {}
        absent: dict[tuple[str, str], str] = {}
        for which in PASSES:
            calls: dict[str, Callable[[], object]] = {"ours": own[which]}
            for peer in peers:
                start = time.perf_counter()
                try:
                    if peer not in made:
                        made[peer] = self.peer(peer, inputs, ours, lengths)
                    found = getattr(made[peer], which)()
                    if form == "softmax" or peer != "FlexAttention":
                        results = found if isinstance(found, tuple) else (found,)
                        check(made[peer], f"{peer} {which}", expected[which], results)
                    torch.cuda.synchronize()
                    calls[peer] = getattr(made[peer], which)
                except Exception as error:
                    absent[which, peer] = last_line(error)
                    print(f"absent: {peer} {which} {name} dim{width}: {last_line(error)}", flush=True)
                print(f"  {peer} {which} ready in {time.perf_counter() - start:.1f} s", flush=True)
            teraflop = PASSES[which] * 4 * width * HEADS * ours.pairs / 1e12
            why = {peer: reason for (of, peer), reason in absent.items() if of == which}
            self.rate(f"{self.root}/{which}/dim{width}/{name}", teraflop, peers, calls, why)
        tables: dict[str, tuple[Table, ...]] = {
            "times": ("time_buckets",),
            "rab": ("positions", "time_buckets"),
        }
        for bias, of_bias in tables.items():
            biased = GpuAttention(
                *(lengths.tolist(), HEADS, width, "bfloat16", mask, seed, of_bias),
                places=int(lengths.max()),
                form=form,
            )
            biased.make_plan()
            for which, call in {"forward": biased.forward, "backward": biased.gradients}.items():
                teraflop = PASSES[which] * 4 * width * HEADS * ours.pairs / 1e12
                where = f"{self.root}/{which}/dim{width}/{name}/{bias}"
                self.rate(where, teraflop, [], {"ours": call}, {})
        from parts.gpu_timing import in_turn

        plan = in_turn({"plan": ours.make_plan}, self.runs)["plan"][1]
        self.results.append(Result(f"{self.root}/plan/dim{width}/{name}", 1e3 * plan, "ms"))
        times = in_turn({"map": biased.map_times}, self.runs)["map"][1]
        self.results.append(Result(f"{self.root}/map/dim{width}/{name}", 1e3 * times, "ms"))
        megabytes = biased.time_map.numel() / 1e6
        self.results.append(Result(f"{self.root}/map/dim{width}/{name}/size", megabytes, "MB"))
        self.write()

    def rate(
        self, name: str, teraflop: float, peers: list[str],
        calls: Mapping[str, Callable[[], object]], why: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Time one pass of ours and of the available peers."""
        from parts.gpu_timing import in_turn

        rates = {who: [teraflop / t for t in times] for who, times in in_turn(calls, self.runs).items()}
        p10, p50 = rates["ours"]
        added: list[Result] = [
            Rate(name, p50, "TFLOP/s", peer, theirs[1], p10, theirs[0], why.get(peer))
            for peer in peers
            for theirs in [rates.get(peer, [None, None])]
        ] or [Rate(name, p50, "TFLOP/s", p10=p10)]
        added.append(Result(f"{name}/share", 100 * p50 / self.matmul, "% of matmul"))
        for result in added:
            self.tell(result)
        self.results += added
        self.write()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dims", default="128,256,64", help="widths of heads (default: %(default)s)")
    options.add_argument(
        "--lengths",
        default="4096,2048,1024,512,jagged",
        help="lengths of sequences, in the order in which they are measured (default: %(default)s)",
    )
    options.add_argument(
        "--form", default="silu", choices=PEERS, help="how scores become weights (default: %(default)s)"
    )
    options.add_argument(
        "--window", type=int, metavar="TOKENS", help="how far back a token sees; the peer is FlexAttention"
    )
    options.add_argument("--alone", action="store_true", help="don't measure the peers")
    given = options.parse_args()
    absent = why_absent()
    if absent is not None:
        report(f"Not measured: {absent}", [Result("gpu_attention/gpus", 0, "GPUs")], given.json)
        return
    import torch

    bench = Bench(given)
    for width in map(int, given.dims.split(",")):
        peers = list(PEERS[given.form]) if given.window is None else ["FlexAttention"]
        if width == 64 or given.alone:  # 64 is for ours alone
            peers = []
        for word in ["512", "jagged"] if given.smoke else given.lengths.split(","):
            if word == "jagged":
                lengths, name = jagged_lengths(np.random.default_rng(0), bench.tokens), word
            else:
                lengths, name = np.full(bench.tokens // int(word), int(word)), f"length{word}"
            if given.window is not None:
                name += f"/window{given.window}"
            bench.case(width, name, lengths, peers)
            gc.collect()
            torch.cuda.empty_cache()
    bench.matmul_rate("after")
    report("Attention on the GPU", bench.results, given.json, **bench.facts)


if __name__ == "__main__":
    main()
