"""Dynamic hash tables of embedding rows, their records and snapshots."""
