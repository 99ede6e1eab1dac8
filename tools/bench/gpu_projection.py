"""The product before an HSTU layer's attention on the GPU, activated as it is written, or in a separate pass.

    python tools/bench/gpu_projection.py --json FILE

fused    Z = X W and SiLU of its v, q and k in one pass, by the library's C interface
apart    the product by PyTorch's library, and SiLU in a separate pass
matmul   that product alone, in TFLOP/s, and fused's rate as a part of it

X is (tokens, width) and W (width, 4 width), of bfloat16: what a block of HSTU projects. Calls take turns;
times are by CUDA events, medians of 50 calls after 10. Results are compared before they are timed. It
requires PyTorch.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from support.gpu.cuda_library import why_missing  # noqa: E402
from support.gpu.gpu_projection import GpuProjection  # noqa: E402

from harness import Result, parser, report  # noqa: E402

MOST_APART = 1e-2
"""||a - b|| / ||b|| of two results in bfloat16."""


def measure(tokens: int, width: int, runs: int) -> list[Result]:
    """One width of tokens."""
    import torch
    from parts.gpu_timing import in_turn

    case = GpuProjection(tokens, width, 4 * width, width, "bfloat16")
    ours: list[Any] = [each.float() for each in case.run()]
    for found, expected in zip(case.apart(), ours, strict=True):
        difference = float((found.float() - expected).norm() / expected.norm())
        if not difference < MOST_APART:
            raise AssertionError(f"{tokens} x {width}: results are {difference:.3g} apart")
    calls = {
        "fused": case.run,
        "apart": case.apart,
        "matmul": lambda: torch.matmul(case.x, case.w, out=case.z),
    }
    seconds = {name: median for name, (_, median) in in_turn(calls, runs).items()}
    teraflop = 2 * 4 * width * width * tokens / 1e12
    path = f"gpu_projection/tokens{tokens}/width{width}"
    return [
        Result(f"{path}/fused", 1e3 * seconds["fused"], "ms", "apart", 1e3 * seconds["apart"]),
        Result(f"{path}/matmul", teraflop / seconds["matmul"], "TFLOP/s"),
        Result(f"{path}/share", 100 * seconds["matmul"] / seconds["fused"], "% of matmul"),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", default="2048,16384,65536", help="of a batch (default: %(default)s)")
    options.add_argument("--widths", default="256,512,1024", help="of tokens (default: %(default)s)")
    given = options.parse_args()
    absent = why_missing() if importlib.util.find_spec("torch") else "PyTorch isn't installed"
    if absent is not None:
        report(f"Not measured: {absent}", [Result("gpu_projection/gpus", 0, "GPUs")], given.json)
        return
    import torch

    counts, runs = ("1000", 3) if given.smoke else (given.tokens, 50)
    sizes = [(int(tokens), int(width)) for width in given.widths.split(",") for tokens in counts.split(",")]
    results = [each for size in sizes for each in measure(*size, runs)]
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    report("A projection that is activated as it is written", results, given.json, **facts)


if __name__ == "__main__":
    main()
