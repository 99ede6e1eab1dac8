"""Training on streams, without end: the settings and the model in `online_model`, the training in `follow`.

``gmeta train --follow`` is built from these.
"""
