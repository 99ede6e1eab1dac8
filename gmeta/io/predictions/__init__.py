"""Writes a model's predictions for a prepared split, in parts that can be resumed.

`write` computes the predictions, and `plan` describes the folder: its plan and its manifest.
"""

__all__: list[str] = []
