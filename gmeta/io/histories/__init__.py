"""Readers of stores of users' histories.

`store` reads histories by a native op, `late_reader` reads sequences with them, and `history_plan` joins the
store's events and the tail that an example contains.
"""

__all__: list[str] = []
