"""Experiments on the next item: histories of users, models and baselines that rank the whole catalogue.

``plan`` has the settings, ``histories`` reads a prepared data set and cuts it by a protocol, ``counting`` has
the baselines, ``models`` the models, and ``blend`` the method that weighs all of them. ``ranked`` has the
metrics, ``runs`` trains and measures, and ``page`` writes the tables and the report.
"""
