"""Measurement of methods and baselines on held-out tasks.

`methods` computes the predictions, `split` measures them on one test split, and `run_pool` evaluates one run,
or several that together hold out all tasks.
"""

__all__: list[str] = []
