"""Dynamic hash tables of embedding rows, their records and snapshots.

- `hash_table`: `HashTable`, whose parts are the modules below.
- `read_ahead` fetches rows early, `followed_optimizer` takes over a Keras optimizer.
- `records`: the data that is exported and imported.
- `restored_rows`: snapshots to restore, and rows that were saved under other layouts.
- `portable_tables` traces graphs without gmeta's native ops.
- `finite` names the ids of rows and gradients that aren't finite.
"""

__all__: list[str] = []
