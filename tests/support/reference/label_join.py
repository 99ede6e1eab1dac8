"""What `LabelJoin` computes, one row at a time, in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

_MASK = 2**64 - 1


def murmur(word: int) -> int:
    """The 64-bit finalizer of MurmurHash3."""
    word &= _MASK
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _MASK
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return word ^ word >> 33


def add_word(fingerprint: int, word: int) -> int:
    """Add a word to a fingerprint."""
    return murmur(fingerprint ^ murmur(word + 0x9E3779B97F4A7C15))


def fingerprint(key: Sequence[int | str]) -> int:
    """The fingerprint of a key of some columns."""
    found = 0
    for value in key:
        if isinstance(value, str):
            text = value.encode()
            words = [
                len(text),
                *(int.from_bytes(text[at : at + 8], "little") for at in range(0, len(text), 8)),
            ]
        else:
            words = [value]
        for word in words:
            found = add_word(found, word)
    return found


def keeps_negative(key: Sequence[int | str], share: float) -> bool:
    """Whether sampling keeps a key's negative."""
    return (add_word(fingerprint(key), int.from_bytes(b"vitagen", "little")) >> 11) * 2.0**-53 < share


@dataclass
class Event:
    """A row of the log."""

    key: int
    time: int
    side: int
    part: int
    name: Any
    row: int
    label: float = 1.0


@dataclass
class ReferenceJoin:
    """The state of a join: `known` by name in order of arrival, `waiting` in order of arrival."""

    within: int
    lateness: int
    corrections: int
    keeps: Callable[[Hashable], bool]
    known: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    waiting: list[Event] = field(default_factory=list)
    written: list[tuple[int, float, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def process(self, event: Event) -> None:
        """Add a row of the log."""
        self.advance(event.key)
        if event.side == 0:
            self.expose(event)
        else:
            self.counts["outcomes"] += 1
            if event.name in self.known:
                self.match(event, self.known[event.name])
            else:
                self.waiting.append(event)

    def advance(self, key: float) -> None:
        """Close, forget and expire what the key passes."""
        until = self.within + self.lateness
        late = [e for e in self.known.values() if not e["passed"] and key > e["time"] + until]
        for exposure in sorted(late, key=lambda e: e["time"]):  # stable: equal ones by arrival
            exposure["passed"] = True
            if exposure["status"] == "open":
                kept = self.keeps(exposure["name"])
                exposure["status"] = "negative" if kept else "thinned"
                self.counts["negatives" if kept else "thinned"] += 1
                if kept:
                    self.written.append((exposure["row"], 0.0, 1.0))
        until += self.corrections
        self.known = {name: e for name, e in self.known.items() if not key > e["time"] + until}
        expired = [event for event in self.waiting if key > event.key + until]
        self.counts["unmatched_outcomes"] += len(expired)
        self.waiting = self.waiting[len(expired) :]

    def expose(self, event: Event) -> None:
        """Add an exposure."""
        self.counts["exposures"] += 1
        if event.name in self.known:
            self.counts["repeated_exposures"] += 1
            return
        self.counts["late_exposures"] += event.key > event.time + self.within + self.lateness
        exposure = {
            "name": event.name,
            "time": event.time,
            "row": event.row,
            "part": event.part,
            "status": "open",
            "passed": False,
        }
        self.known[event.name] = exposure
        own = [other for other in self.waiting if other.name == event.name]
        self.waiting = [other for other in self.waiting if other.name != event.name]
        for outcome in own:
            self.match(outcome, exposure)

    def match(self, outcome: Event, exposure: dict[str, Any]) -> None:
        """Label an exposure by an outcome of its key, if it belongs to it."""
        if not exposure["time"] <= outcome.time < exposure["time"] + self.within + self.corrections:
            self.counts["unmatched_outcomes"] += 1
        elif exposure["status"] == "positive":
            self.counts["repeated_outcomes"] += 1
        else:
            self.counts["positives"] += 1
            self.counts["corrections"] += exposure["status"] != "open"
            if exposure["status"] == "negative":
                self.written.append((exposure["row"], 0.0, -1.0))
            self.written.append((exposure["row"], outcome.label, 1.0))
            exposure["status"] = "positive"

    def select(self, others: Sequence[ReferenceJoin], parts: set[int]) -> None:
        """Replace the state by what others know of some partitions."""
        self.known = {
            name: dict(exposure)
            for other in others
            for name, exposure in other.known.items()
            if exposure["part"] in parts
        }
        self.waiting = sorted(
            (event for other in others for event in other.waiting if event.part in parts),
            key=lambda event: event.key,
        )
