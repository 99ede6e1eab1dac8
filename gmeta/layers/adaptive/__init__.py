"""Layers whose weights adapt to a task.

`mlp` is dense layers that take weights from the caller, `task_network` does the same for any Keras network,
and `row_copies` holds the rows that the inner loop adapts, one copy per task.
"""

__all__: list[str] = []
