"""The plan of an experiment: its data, columns, methods and seeds.

`experiment_config` has the settings, and `next_item_config` and `generative_config` those for the next item;
`own_plan` and `own_columns` derive them from a user's own data set, and `task_sets` are the tasks to train on
and to measure.
"""

__all__: list[str] = []
