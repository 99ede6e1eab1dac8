"""``gmeta semantic-ids``: makes codes of items out of their vectors."""

from __future__ import annotations

from gmeta.cli.semantic_ids.making import command

__all__ = ["command"]
