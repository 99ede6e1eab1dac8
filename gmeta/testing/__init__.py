"""Helpers of the tests: data, fixtures, references. Nothing else imports this."""
