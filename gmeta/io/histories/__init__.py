"""Readers of stores of users' histories.

`store` reads histories by a native op, `late_reader` reads sequences with them, and `history_plan` joins what
the store has to the tail that an example carries.
"""

__all__: list[str] = []
