"""Experiments that rank a catalogue: the next item of a history, and retrieval for sets of items.

``histories`` reads a prepared data set and cuts it by a protocol, ``counting`` has the baselines, ``models``
and ``generative`` the models, and ``blend`` the method that weighs all of them. ``ranked`` has the metrics,
``runs`` completes the settings, trains and measures, ``page`` writes the tables and the report,
``recommendations`` writes the likeliest items, and ``served`` exports a run.
`gmeta.experiment.plan.next_item_config` and `generative_config` have the settings.
"""

__all__: list[str] = []
