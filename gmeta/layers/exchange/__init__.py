"""Sends keys, rows and gradients to the ranks that own them.

- `fetch` fetches the rows of several tables, and `pieces` is a lookup and its gradients in pieces.
- `recorded_lookups` records a step's lookups, so that their rows can be trained.
- `ahead` requests the keys of later steps.
- `frozen_window`, `window_keys` and `window_gradients`: steps of several micro-batches.
- `groups` keeps copies of rows equal in groups of ranks.
"""

__all__: list[str] = []
