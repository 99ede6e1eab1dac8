"""Generation of synthetic data to try gmeta on.

`ratings` and `exposures` write data sets. `user_simulator` simulates users, by the settings and
probabilities of `user_law`.
"""

__all__: list[str] = []
