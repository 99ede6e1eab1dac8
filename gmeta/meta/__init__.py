"""The inner and the outer loop of meta-learning over plain callables.

Nothing here knows a model, a table or Horovod: parameters are mappings of tensors, losses are functions of
them. G-Meta section 2.1; MAML (Finn et al., 2017), algorithm 1.
"""

from gmeta.meta.adaptation import Adaptation as Adaptation
from gmeta.meta.adaptation import Adapted as Adapted
from gmeta.meta.adaptation import adapt as adapt
from gmeta.meta.adaptation import inner_step as inner_step
from gmeta.meta.adaptation import per_task as per_task
from gmeta.meta.inner_loop import InnerLoop as InnerLoop
from gmeta.meta.inner_optimizers import SGD as SGD
from gmeta.meta.inner_optimizers import Adam as Adam
from gmeta.meta.inner_optimizers import Momentum as Momentum
from gmeta.meta.reduction import reduce_tasks as reduce_tasks
from gmeta.meta.reduction import task_means as task_means
