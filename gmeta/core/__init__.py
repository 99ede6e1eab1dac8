"""Code that all packages use: errors, configuration, native libraries, collectives, the choice of Keras.

- `errors`, `settings`, `json_values` and `files`: errors, TOML settings, foreign JSON, and atomic writes.
- `native`, `graph`, `finite`, `autograph` and `version`: native libraries, and checks around TensorFlow.
- `schema`, `data_manifest`, `group_index`, `texts`, `position` and `shares`: prepared data, and how ranks
  share it.
- `history_manifest`, `semantic_ids` and `code_trie`: stores of histories, and codes of items.
- `merged_keys` and `data`: tables that are merged, and the names that users gave them.
- `collectives` and `launcher`: a job's ranks, and the processes that they are.
- `lazy`, `terminal` and `step_marks`: exports on first use, progress bars, and clocks of a step's parts.
- `schedules`: learning rates by steps.
"""

__all__: list[str] = []
