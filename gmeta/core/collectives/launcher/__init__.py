"""Starts the ranks of a job: on this machine, under horovodrun, or as an elastic job."""

__all__: list[str] = []
