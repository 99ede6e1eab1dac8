"""Helpers of the tests: data, fixtures, references. Nothing else imports this."""

__all__: list[str] = []
