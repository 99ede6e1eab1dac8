"""Looks up the features of a batch in their tables.

- `collection`: `EmbeddingCollection`, the layer that makes one lookup of all features.
- `feature_config` and `table_config`: its settings, and their conversion to JSON and back.
- `merge_plan` merges tables, and orders the vectors of features.
- `pooling` pools and joins the vectors of a sample's ids.
- `saved_tables` and `table_weights`: rows in checkpoints, in Keras' files, and in `get_weights`.
"""

__all__: list[str] = []
