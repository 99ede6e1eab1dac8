"""Starts the ranks of a job: on this machine, under horovodrun, or of an elastic job."""

__all__: list[str] = []
