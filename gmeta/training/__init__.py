"""What `fit` does: steps, optimizers, pipelines, ranks, and the guards of a training.

- `model`: the Keras model that trains tables; `compile_settings` and `saves_tables` are parts of it.
- `joint_optimizer`, `table_rule` and `learning_rates`: one optimizer and one rate for dense weights and rows.
- `mean_gradients` and `accumulator`: gradients over ranks, and over several batches.
- `pipeline`, `foresight`, `steps_ahead` and `windows`: steps that fetch ahead, in micro-batches.
- `rank_start`, `rank_steps`, `rank_loops` and `rank_data`: training on several ranks.
- `clusters` and `token_limit`: the order of a batch's samples, and its largest size.
- `faults`: what a step refuses, reported in one line.
"""

__all__: list[str] = []
