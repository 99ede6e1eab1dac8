"""Reading of MovieLens folders.

`movielens_source` reads the published data sets, `movielens_folder` finds their files, and
`movielens_records` parses their lines, those of MovieLens-1M as MeLU published it too.
"""

__all__: list[str] = []
