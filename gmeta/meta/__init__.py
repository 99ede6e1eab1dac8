"""The inner and the outer loop of meta-learning over plain callables.

`inner_loop` has the settings of an inner loop, `adaptation` its gradient steps and their optimizers, and
`ridge` the head in closed form. This package doesn't depend on models, tables or Horovod:
parameters are mappings of tensors, and losses are functions of them. See G-Meta, section 2.1, and MAML (Finn
et al., 2017), algorithm 1.
"""

from gmeta.core.imports import load_lazily
from gmeta.meta.adaptation import SGD, Adam, Momentum
from gmeta.meta.inner_loop import HeadPrior, InnerLoop

_MOVED = {
    "Adaptation": "gmeta.meta.adaptation",
    "Adapted": "gmeta.meta.adaptation",
    "adapt": "gmeta.meta.adaptation",
    "inner_step": "gmeta.meta.adaptation",
    "per_task": "gmeta.meta.adaptation",
    "reduce_tasks": "gmeta.meta.inner_loop",
    "task_means": "gmeta.meta.inner_loop",
}
"""Old name -> the module that has it now, for one release."""

__all__ = ["SGD", "Adam", "HeadPrior", "InnerLoop", "Momentum"]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
