"""Sends keys, rows and gradients to the ranks that own them.

- `fetch` fetches the rows of several tables, and requests the keys of later steps.
- `pieces` is a lookup and its gradients in pieces; it keeps copies of rows equal in groups of ranks.
- `recorded_lookups` records a step's lookups, so that their rows can be trained.
- `frozen_window` and `window_keys`: steps of several micro-batches.
"""

__all__: list[str] = []
