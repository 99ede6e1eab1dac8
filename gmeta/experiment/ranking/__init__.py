"""Experiments on rows with labels: click and rating prediction, with or without users.

``examples`` reads a prepared data set, cuts it by a protocol and encodes it, and ``plan`` completes the
settings; ``drawn_data`` reads rows and draws negatives. ``baselines`` has the baselines, ``networks`` has the
models, and ``models`` trains them. ``runs`` trains a whole experiment and fits the blend, which weighs all
methods; ``page`` measures it and writes the tables and the report, ``predictions`` scores new rows, and
``served`` exports a run.
"""

__all__: list[str] = []
