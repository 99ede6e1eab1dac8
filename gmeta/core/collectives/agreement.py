"""Refuses to go on if ranks differ in values that must be the same, and names the ranks that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gmeta.core.collectives.objects import allgather_objects
from gmeta.core.errors import ConfigError


def check_agreement(what: Mapping[str, str], *, advice: str = "give every rank the same settings") -> None:
    """Check that all ranks have the same values, such as package versions or a digest of the settings.

    All ranks must call it. A single rank always agrees.

    Args:
      what: Name -> this rank's value.
      advice: What to do about a difference; the message ends with it.

    Raises:
      ConfigError: Any two ranks differ; every rank raises it. The message names the first few things that
        differ, and each of their values with the ranks that have it.
      CollectiveError: A rank has ended, or called something else.
    """
    differences = disagreements(allgather_objects(dict(what)))
    if differences:
        shown = "; ".join(differences[:3])
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ConfigError(f"ranks disagree on {shown}{more}; {advice}")


def disagreements(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """List where the ranks' mappings differ, one phrase for each name; the list is empty if they agree.

    Example:
      >>> disagreements([{"numpy": "1.26.4"}, {"numpy": "1.26.4"}, {"numpy": "1.25.0"}])
      ['numpy: 1.25.0 on rank 2, 1.26.4 on ranks 0, 1']
    """
    phrases = []
    for name in dict.fromkeys(name for values in by_rank for name in values):
        values = [by_rank[rank].get(name, "nothing") for rank in range(len(by_rank))]
        if len(set(values)) > 1:
            few_first = sorted(Counter(values).items(), key=lambda item: (item[1], -values.index(item[0])))
            parts = (f"{value} on {_ranks(values, value)}" for value, _ in few_first)
            phrases.append(f"{name}: {', '.join(parts)}")
    return phrases


def _ranks(values: Sequence[str], value: str) -> str:
    ranks = [str(rank) for rank, other in enumerate(values) if other == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
