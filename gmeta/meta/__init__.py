"""The inner and the outer loop of meta-learning over plain callables.

Nothing here knows a model, a table or Horovod: parameters are mappings of tensors, losses are functions of
them. G-Meta section 2.1; MAML (Finn et al., 2017), algorithm 1.
"""

from gmeta.meta.inner_loop import InnerLoop as InnerLoop
from gmeta.meta.inner_loop import adapt as adapt
from gmeta.meta.inner_loop import inner_step as inner_step
from gmeta.meta.inner_loop import per_task as per_task
from gmeta.meta.reduction import reduce_tasks as reduce_tasks
from gmeta.meta.reduction import task_means as task_means
