"""Models over users' histories: next items, generative ranking, and both with meta-learning.

- `next_item_model`: a backbone with sampled negatives; `history_model`: its base class.
- `grm_model` ranks exposures, `exposure_trunk` is its layer, and `meta_grm` adapts its heads to users.
- `user_states` keeps what a model has read of users as bytes, whose layout is that of `state_format`.
- `nearest_items` finds the best of many items by an index.
- `catalogue` numbers the items, and `sequence_columns` reads the columns of a batch.
"""

__all__: list[str] = []
