"""The sparse optimizers' formulas in NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gmeta.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, Momentum, RowWiseAdagrad, SparseOptimizer

Floats = npt.NDArray[np.float32]


def update_row(
    optimizer: SparseOptimizer, row: Floats, slots: Floats, gradient: Floats, learning_rate: float, step: int
) -> None:
    """One optimizer step, in place.

    Args:
      optimizer: Any of gmeta's.
      row: (dim,) weights.
      slots: (slot_floats,), the optimizer's slots one after another.
      gradient: (dim,).
      learning_rate: For this step.
      step: The table's step, counted from 1.

    Raises:
      TypeError: Another optimizer.
    """
    rate, dim = np.float32(learning_rate), len(row)
    match optimizer:
        case SGD():
            row -= rate * gradient
        case RowWiseAdagrad():  # before Adagrad, which it is a kind of
            slots[0] += np.mean(gradient * gradient)
            row -= rate * gradient / np.sqrt(slots[0] + np.float32(optimizer.epsilon))
        case Adagrad():
            slots += gradient * gradient
            row -= rate * gradient / np.sqrt(slots + np.float32(optimizer.epsilon))
        case Momentum():
            momentum = np.float32(optimizer.momentum)
            slots *= momentum
            slots -= rate * gradient
            row += momentum * slots - rate * gradient if optimizer.nesterov else slots
        case Adam(beta_1=beta_1, beta_2=beta_2, epsilon=epsilon):
            if isinstance(optimizer, AdamW):
                row -= np.float32(float(rate) * optimizer.weight_decay) * row
            m, v = slots[:dim], slots[dim:]
            m += (gradient - m) * np.float32(1 - beta_1)
            v += (gradient * gradient - v) * np.float32(1 - beta_2)
            alpha = np.float32(float(rate) * np.sqrt(1 - beta_2**step) / (1 - beta_1**step))
            row -= m * alpha / (np.sqrt(v) + np.float32(epsilon))
        case Ftrl():
            power, l1 = np.float32(-optimizer.learning_rate_power), np.float32(optimizer.l1)
            accumulator, linear = slots[:dim], slots[dim:]
            before = accumulator**power
            accumulator += gradient * gradient
            after = accumulator**power
            linear += gradient + np.float32(2 * optimizer.l2_shrinkage) * row - (after - before) / rate * row
            strength = np.float32(2 * optimizer.l2 + optimizer.beta / float(rate))
            row[:] = (np.clip(linear, -l1, l1) - linear) / (after / rate + strength)
        case _:
            raise TypeError(f"no reference for {optimizer}")


def with_prior(
    optimizer: SparseOptimizer, row: Floats, gradient: Floats, missed: int, learning_rate: float
) -> Floats:
    """A row's gradient, with that of the prior for the steps that the row has missed.

    Args:
      optimizer: Any of gmeta's.
      row: (dim,) weights.
      gradient: (dim,).
      missed: The steps since the row's last update, this one included.
      learning_rate: For this step.
    """
    l2 = np.array(optimizer.prior_l2(len(row)), np.float32)
    if not len(l2):
        return gradient
    with np.errstate(divide="ignore"):
        most = np.float32(1) / np.float32(learning_rate)
    return gradient + np.minimum(l2 * np.float32(missed), most) * row
