"""Reading of MovieLens folders.

`movielens_folder`, `movielens_records` and `movielens_source` read the published data sets, `melu_records`
and `melu_source` MovieLens-1M as MeLU published it.
"""

__all__: list[str] = []
