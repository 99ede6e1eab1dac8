"""Experiments on the next item: histories of users, models and baselines that rank the whole catalogue.

``histories`` reads a prepared data set and cuts it by a protocol, ``counting`` has the baselines and ``blend``
the method that weighs all of them, ``ranked`` has the metrics, ``plan`` the settings, ``runs`` trains, and
``page`` writes the table and the report. `gmeta train --for next-item` goes through them in this order.
"""
