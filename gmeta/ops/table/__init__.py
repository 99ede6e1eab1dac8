"""Dynamic hash tables of embedding rows, their records and snapshots.

- `hash_table`: `HashTable`, whose parts are the modules below.
- `read_ahead` fetches rows early, `followed_optimizer` adopts a Keras optimizer.
- `records`: exported and imported data.
- `restored_rows`: snapshots, and rows that were saved with other layouts.
- `portable_tables` traces graphs without gmeta's native ops.
- `finite` names the ids of rows and gradients that aren't finite.
"""

__all__: list[str] = []
