"""The version of gmeta."""

__version__ = "0.1.0.dev0"
