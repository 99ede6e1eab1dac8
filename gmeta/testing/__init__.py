"""Helpers of the tests; nothing else imports this.

`attention` computes attention in NumPy, and `small_experiment` writes small MovieLens folders.
"""

__all__: list[str] = []
