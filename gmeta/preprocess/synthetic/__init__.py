"""Generation of synthetic data to try gmeta on.

`ratings` and `exposures` write data sets. `user_simulator` simulates users, by the probabilities of
`user_law` and the settings of `simulator_config`.
"""

__all__: list[str] = []
