"""Code that all packages use: errors, configuration, native libraries, collectives, the choice of Keras.

- `errors`, `settings`, `json_values` and `files`: errors, TOML settings, foreign JSON, and atomic writes.
- `native`, `graph`, `keras` and `version`: native libraries, and adaptations of TensorFlow and Keras.
- `schema`, `data_manifest`, `group_index`, `position` and `shares`: prepared data, and how ranks
  share it.
- `history_manifest` and `semantic_ids`: stores of histories, and codes of items.
- `merged_tables`: tables that share a physical table, and the names that users gave them.
- `collectives` and `launcher`: a job's ranks and their processes.
- `imports` and `terminal`: lazy exports, extras and moved modules; progress bars.
- `step` and `schedules`: the context of a training step, and learning rates by steps.
"""

__all__: list[str] = []
