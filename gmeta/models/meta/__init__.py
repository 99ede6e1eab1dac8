"""Meta-learning models: the learner, the adapter, and the Keras model over them.

- `meta_model` and `task_model`: `MetaModel`, MeLU, and the Keras model that `MetaModel` extends.
- `task_learner` runs the inner and the outer loop; `outer_rules` has a rule for each algorithm,
  `ridge_steps` the inner steps in closed form.
- `task_view`, `task_losses` and `sample_columns`: batches of tasks, their losses, and columns of samples.
- `adapter` and `fast_weights`: adaptation after training, and adapted weights as values.
"""

__all__: list[str] = []
