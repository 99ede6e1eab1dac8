"""Dynamic hash tables of embedding rows, their records and snapshots.

- `hash_table`: `HashTable`, whose parts are the modules below.
- `read_ahead` fetches rows early, `followed_optimizer` takes over a Keras optimizer.
- `records` and `snapshot`: the data that is exported and imported, and copies to restore.
- `moved_rows` fills tables with rows that were saved under other layouts.
- `portable_tables` traces graphs without gmeta's native ops.
- `finite` names the ids of rows and gradients that aren't finite.
"""

__all__: list[str] = []
