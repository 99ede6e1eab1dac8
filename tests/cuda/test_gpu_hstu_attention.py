"""HSTU's attention on the GPU, and its gradients, against float64."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from support.gpu.cuda_library import CudaError
from support.gpu.gpu_attention import Form, GpuAttention, Mask, Table

torch: Any = pytest.importorskip("torch")
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("the kernels are Hopper's", allow_module_level=True)

LENGTHS = [5, 0, 1, 63, 64, 65, 129, 300, 1000, 2600, 128, 0]
NAMES = ("q", "k", "v")


def error(found: Any, expected: Any) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def every_second(case: GpuAttention) -> Any:
    """(tokens,) bool: the tokens of every second sequence."""
    chosen = torch.zeros(case.tokens, dtype=torch.bool, device="cuda")
    for begin, end in zip(case.ends[:-1:2], case.ends[1::2], strict=True):
        chosen[begin:end] = True
    return chosen


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("mask", get_args(Mask))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_forward(width: int, dtype: str, mask: Mask, form: Form) -> None:
    case = GpuAttention(LENGTHS, 2, width, dtype, mask, seed=width + len(mask), form=form)
    case.make_plan()
    found = case.forward().clone()
    exact, naive = case.expected("float64"), case.expected(dtype)
    assert error(found, exact) <= 2 * error(naive, exact)

    case.out.fill_(torch.nan)
    assert torch.equal(found, case.forward()), "results differ from run to run"

    poisoned = every_second(case)
    case.inputs[poisoned] = torch.nan
    after = case.forward()
    assert torch.equal(found[~poisoned], after[~poisoned]), "numbers of other sequences get in"
    assert torch.isnan(after[poisoned]).all(), "NaN is lost"


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("mask", get_args(Mask))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_gradients(width: int, dtype: str, mask: Mask, form: Form) -> None:
    case = GpuAttention(LENGTHS, 2, width, dtype, mask, seed=width + len(mask), form=form)
    case.make_plan()
    case.forward()
    found = case.gradients().clone()
    (exact, _), (naive, _) = case.expected_gradients("float64"), case.expected_gradients(dtype)
    for name, x, right, rough in zip(NAMES, found, exact, naive, strict=True):
        assert error(x, right) <= 2 * error(rough, right), name

    case.results.fill_(torch.nan)
    assert torch.equal(found, case.gradients()), "results differ from run to run"

    poisoned = every_second(case)
    case.inputs[poisoned] = torch.nan
    case.forward()
    after = case.gradients()
    assert torch.equal(found[:, ~poisoned], after[:, ~poisoned]), "numbers of other sequences get in"
    assert torch.isnan(after[:, poisoned]).all(), "NaN is lost"


@pytest.mark.parametrize("tables", [["positions"], ["time_buckets"], ["positions", "time_buckets"]])
@pytest.mark.parametrize("mask", ["causal", "mixed"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("form", get_args(Form))
def test_a_bias(form: Form, width: int, mask: Mask, tables: list[Table]) -> None:
    case = GpuAttention(LENGTHS, 2, width, "bfloat16", mask, seed=width, bias=tables, form=form)
    case.make_plan()
    exact, naive = case.expected("float64"), case.expected("bfloat16")
    assert error(case.forward(), exact) <= 2 * error(naive, exact)

    found, of_tables = case.gradients().clone(), {name: x.clone() for name, x in case.table_gradients.items()}
    (exact, of_exact), (naive, of_naive) = (
        case.expected_gradients("float64"),
        case.expected_gradients("bfloat16"),
    )
    for name, x, right, rough in zip(NAMES, found, exact, naive, strict=True):
        assert error(x, right) <= 2 * error(rough, right), name
    for table in tables:
        assert error(of_tables[table], of_exact[table]) <= 2 * error(of_naive[table], of_exact[table]), table
        # The gradients of softmax are made of its rounded outputs.
        assert error(of_tables[table], of_exact[table]) < (2e-3 if form == "silu" else 8e-3), table

    case.results.fill_(torch.nan)
    assert torch.equal(found, case.gradients()), "results differ from run to run"
    for table in tables:
        assert torch.equal(of_tables[table], case.table_gradients[table]), "and those of tables"


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("width", [64, 128, 256])
def test_many_short_sequences(width: int, form: Form) -> None:
    lengths = np.random.default_rng(width).integers(1, 200, 1500).tolist()
    case = GpuAttention(lengths, 4, width, "bfloat16", "targets", form=form)
    case.make_plan()
    assert error(case.forward(), case.expected("float64")) < 5e-3
    found, (exact, _) = case.gradients(), case.expected_gradients("float64")
    assert max(error(x, right) for x, right in zip(found, exact, strict=True)) < 5e-3


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("width", [64, 128, 256])
def test_window_of_a_long_sequence(width: int, form: Form) -> None:
    """Most groups of strips are hidden."""
    case = GpuAttention([7000, 100], 1, width, "bfloat16", 700, form=form)
    case.make_plan()
    assert error(case.forward(), case.expected("float64")) < 5e-3
    found, (exact, _) = case.gradients(), case.expected_gradients("float64")
    assert max(error(x, right) for x, right in zip(found, exact, strict=True)) < 5e-3


@pytest.mark.parametrize("form", get_args(Form))
def test_window_depends_on_near_tokens_alone(form: Form) -> None:
    """A sequence of over 1,024 strips, against its last tokens as a sequence of their own."""
    case, last = (GpuAttention([length], 1, 64, "bfloat16", 700, form=form) for length in (70_016, 4_096))
    last.inputs.copy_(case.inputs[-4_096:])
    for each in (case, last):
        each.make_plan()
    whole, part = case.forward()[-4_096:], last.forward()
    assert error(whole[700:], part[700:].double()) < 5e-3
    whole, part = case.gradients()[:, -4_096:], last.gradients()
    assert error(whole[:, 1_400:], part[:, 1_400:].double()) < 5e-3


@pytest.mark.parametrize("form", get_args(Form))
def test_offsets_that_cant_be_give_nan(form: Form) -> None:
    case = GpuAttention([70, 30], 1, 128, "bfloat16", "causal", form=form)
    case.offsets[1] = 120
    case.make_plan()
    case.results.fill_(1)
    assert torch.isnan(case.gradients()).all()
    case.out.fill_(1)
    assert torch.isnan(case.forward()).all()


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_softmax_of_scores_far_apart(width: int, rising: bool) -> None:
    """Scores grow from place to place, or fall, by so much that exponentials would overflow."""
    case = GpuAttention([300, 700], 2, width, "bfloat16", "full", form="softmax")
    places = torch.arange(case.tokens, device="cuda") / 10
    case.k[:] = (case.k * (places if rising else places.flip(0))[:, None, None]).to(case.dtype)
    case.make_plan()
    exact, naive = case.expected("float64"), case.expected("bfloat16")
    assert error(case.forward(), exact) <= 2 * error(naive, exact)
    found, (exact, _), (naive, _) = (
        case.gradients(),
        case.expected_gradients("float64"),
        case.expected_gradients("bfloat16"),
    )
    for name, x, right, rough in zip(NAMES, found, exact, naive, strict=True):
        assert error(x, right) <= 2 * error(rough, right), name


def test_softmax_with_equal_weights() -> None:
    case = GpuAttention([70, 300], 1, 128, "float16", "causal", form="softmax")
    case.alpha = 0.0
    case.make_plan()
    assert error(case.forward(), case.expected("float64")) < 1e-3


def test_softmax_refuses_a_negative_alpha() -> None:
    case = GpuAttention([70, 300], 1, 128, "float16", "causal", form="softmax")
    case.alpha = -1.0
    with pytest.raises(CudaError, match="softmax takes an alpha of at least 0"):
        case.forward()


@pytest.mark.parametrize("form", get_args(Form))
def test_nothing(form: Form) -> None:
    case = GpuAttention([0, 0], 1, 64, "float16", "causal", form=form)
    case.make_plan()
    assert case.gradients().numel() == 0
    assert case.forward().numel() == 0


def test_pairs() -> None:
    assert GpuAttention([4, 3], 1, 64, "float16", "causal").pairs == 10 + 6
    assert GpuAttention([4, 3], 1, 64, "float16", 1).pairs == 7 + 5
    assert GpuAttention(LENGTHS, 1, 64, "float16", "full").pairs == int(np.square(LENGTHS).sum())
