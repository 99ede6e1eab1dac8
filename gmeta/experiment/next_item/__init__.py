"""Experiments on the next item: histories of users, models and baselines that rank the whole catalogue.

``histories`` reads a prepared data set and cuts it by a protocol, ``plan`` decides what settings leave open,
``counting`` has the baselines, ``models`` the models, and ``blend`` the method that weighs all of them.
``ranked`` has the metrics, ``runs`` trains and measures, ``page`` writes the tables and the report, and
``recommendations`` and ``served`` put a run to use.
"""

__all__: list[str] = []
