"""Cutting groups of rows into support and query sets, or into histories and exposures.

`task_split` defines the rules for query rows and cuts by them, `task_choice` chooses the tasks, and
`sequence_split` cuts histories and exposures.
"""

__all__: list[str] = []
