"""Reading logs that grow, and the labels that arrive after what they label.

`late_labels` joins exposures with their outcomes in event time, and `exposure_rows` keeps the rows of the
exposures that wait, in memory and in files.
"""

__all__: list[str] = []
