"""Experiments on rows with labels: click and rating prediction, with or without users.

``examples`` reads a prepared data set, cuts it by a protocol and encodes it, and ``plan`` decides what
settings leave open. ``baselines`` has the baselines, of which ``bilinear`` and ``drift`` are forms,
``networks`` and ``grm`` the models, ``models`` how they are trained, and ``blend`` the method that weighs all
of them. ``runs`` trains a whole experiment, ``measured`` has the metrics, ``page`` writes the tables and the
report, and ``predictions`` and ``served`` put a run to use.
"""

__all__: list[str] = []
