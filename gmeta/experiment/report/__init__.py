"""The report of an experiment: one page that opens offline.

`page` writes it from ``page.html.j2``, `figures` draws its figures in the style of `style`, and `findings`
writes its sentences.
"""

__all__: list[str] = []
