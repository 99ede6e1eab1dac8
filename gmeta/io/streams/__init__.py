"""Endless data: logs that grow, their rows in order of time, late labels, and the position in all of it.

`stream` describes how a stream is read. `records` parses rows, `folder_log` and `message_logs` are the
sources, `merge` puts partitions in order of time, and `late_labels` joins exposures with their outcomes.
"""
