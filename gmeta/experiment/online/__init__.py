"""Training on streams, without end.

``online_model`` has the settings and the model, ``follow`` the training behind ``gmeta train --follow``, and
``monitor`` its counters for Prometheus.
"""

__all__: list[str] = []
