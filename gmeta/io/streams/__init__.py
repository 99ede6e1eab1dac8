"""Endless data: logs that grow, their rows in order of time, late labels, and the position in all of it.

`event_stream` describes what is read, from logs in `folder_log` and `message_logs`, whose rows `records`
parses. `merge` puts the rows of partitions in order of time, `late_labels` joins exposures with their
outcomes (those that wait are in `open_exposures`), and `position` reads, and holds where.
"""

__all__: list[str] = []
