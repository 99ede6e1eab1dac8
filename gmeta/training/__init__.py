"""What `fit` does: steps, optimizers, pipelines, ranks, and the guards of a training.

- `model`: the Keras model that trains tables; `compile_settings` and `saves_tables` are parts of it.
- `joint_optimizer` and `table_rule`: one optimizer and one rate for dense weights and rows.
- `mean_gradients`: gradients over ranks, and over several batches.
- `dense_updates`: the Keras optimizer's updates, compiled together, and divided among ranks.
- `pipeline`, `steps_ahead` and `windows`: steps that fetch ahead, in micro-batches.
- `rank_steps`, `rank_loops` and `rank_data`: training on several ranks.
- `token_limit`: the largest size of a batch.
- `faults`: what a step refuses, reported in one line.
"""

__all__: list[str] = []
