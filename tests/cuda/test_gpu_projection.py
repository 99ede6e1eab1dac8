"""The product that is activated as it is written, on the GPU, against float64 and a pass of its own."""

from __future__ import annotations

from typing import Any

import pytest

from support.gpu.cuda_library import CudaError
from support.gpu.gpu_projection import GpuProjection

torch: Any = pytest.importorskip("torch")
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("the kernels are Hopper's", allow_module_level=True)

SHAPES = [
    (1, 8, 8, 0),
    (128, 64, 256, 64),
    (129, 200, 264, 192),
    (1000, 1024, 520, 0),
    (20_000, 256, 2048, 512),
    (70_001, 512, 1024, 256),
]


def error(found: Any, expected: Any) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_a_projection(shape: tuple[int, int, int, int], dtype: str) -> None:
    case = GpuProjection(*shape, dtype, seed=shape[0])
    z, activated = (each.clone() for each in case.run())
    exact = case.x.double() @ case.w.double()
    assert error(z, exact) <= 2 * error(case.x @ case.w, exact)
    assert torch.equal(activated, case.activate()), "SiLU isn't that of Z as it is written"

    case.z.fill_(torch.nan), case.activated.fill_(torch.nan)
    again = case.run()
    assert torch.equal(z, again[0]), "Z differs from run to run"
    assert torch.equal(activated, again[1]), "what is activated differs from run to run"


def test_rows_do_not_get_into_each_other() -> None:
    case = GpuProjection(300, 136, 512, 64, "bfloat16")
    before = case.run()[0].clone()
    case.x[::2] = torch.nan
    after = case.run()[0]
    assert torch.equal(before[1::2], after[1::2])
    assert torch.isnan(after[::2]).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [((3, 12, 64, 0), "multiples of 8, got 12"), ((3, 8, 128, 32), "multiple of 64")],
)
def test_what_is_refused(shape: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(CudaError, match=message):
        GpuProjection(*shape, "bfloat16").run()
