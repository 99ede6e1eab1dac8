"""The inner and the outer loop of meta-learning over plain callables.

`inner_loop` has the settings of an inner loop, `inner_optimizers` its optimizers, `adaptation` its gradient
steps, and `ridge` the head in closed form. This package doesn't depend on models, tables or Horovod:
parameters are mappings of tensors, and losses are functions of them. See G-Meta, section 2.1, and MAML (Finn
et al., 2017), algorithm 1.
"""

from gmeta.meta.adaptation import Adaptation, Adapted, adapt, inner_step, per_task
from gmeta.meta.inner_loop import HeadPrior, InnerLoop, reduce_tasks, task_means
from gmeta.meta.inner_optimizers import SGD, Adam, Momentum

__all__ = [
    "SGD",
    "Adam",
    "Adaptation",
    "Adapted",
    "HeadPrior",
    "InnerLoop",
    "Momentum",
    "adapt",
    "inner_step",
    "per_task",
    "reduce_tasks",
    "task_means",
]
