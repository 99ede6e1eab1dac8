"""Tells why a job of ranks ended: which rank was the cause, and which ended as a consequence."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from gmeta.core.collectives.driver import notes as telling


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Attributes:
      rank: The number of the rank.
      code: Its exit code, or minus the number of the signal that ended it.
      seconds: The time from the start of the job until the rank ended.
      ended_here: Whether the launcher ended it.
      tail: The last lines of its stderr.
      told: The notes that it left for the launcher (`gmeta.core.collectives.driver.notes`).
      lost_host: The machine that was lost with it; "" if its end is known.
    """

    rank: int
    code: int
    seconds: float
    ended_here: bool
    tail: tuple[str, ...]
    told: frozenset[str] = frozenset()
    lost_host: str = ""

    @property
    def leaves(self) -> bool:
        """Whether it ended, or was about to end, to start again with another number of ranks."""
        return telling.LEAVES in self.told

    @property
    def blames_others(self) -> bool:
        """Whether it has said that others are gone or didn't come, so the others don't wait for it.

        Gloo's thread reports a lost connection even in a rank that hangs.
        """
        said = _SAID if self.ended_here else _LOST
        return telling.LOST_PEERS in self.told or any(said.search(line) for line in self.tail)

    @property
    def how(self) -> str:
        """Phrase such as ``was killed by SIGKILL``, ``ended with exit code 1`` or ``was lost with host1``."""
        if self.lost_host:
            return f"was lost with {self.lost_host}, whose connection ended with exit code {self.code}"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


@dataclass(frozen=True)
class Verdict:
    """Why a job ended.

    Attributes:
      reason: The rank that caused it, and what happened to that rank.
      culprit: How that rank ended.
      lost: All ranks that failed by themselves, or hung; the others could have gone on without them.
      hopeless: Whether the failure would happen again: all ranks failed alike, or the program ended too soon.
    """

    reason: str
    culprit: RankEnd
    lost: tuple[RankEnd, ...] = ()
    hopeless: bool = False


def verdict(ends: Sequence[RankEnd], timeout: float | None = None) -> Verdict:
    """Tell the cause of a job's failure from its consequences; `ends` is in the order of ending."""
    size = len(ends)
    failed = [end for end in ends if end.code and not end.ended_here and not end.leaves]
    causes = [end for end in failed if not end.blames_others]
    silent = [end for end in ends if end.ended_here]
    # A rank that has reported lost peers, or leaves so that others can join, may exit slowly but isn't hung.
    hung = [end for end in silent if not end.blames_others and not end.leaves]
    left = [end for end in ends if not end.code]
    if len(causes) == size > 1 and len({_reason(end) for end in causes}) == 1:  # such as a wrong setting
        end = causes[0]
        reason = f"all {size} ranks alike: rank {end.rank} {end.how}{_reason(end)}"
        return Verdict(reason, end, hopeless=True)
    if causes:
        end = causes[0]
        reason = f"rank {end.rank} of {size} {end.how} after {end.seconds:.0f} s{_reason(end)}"
        return Verdict(reason, end, tuple(causes))
    if hung and any((end.code and not end.ended_here) or end.blames_others for end in ends):
        them = "it" if len(hung) == 1 else "them"
        reason = f"{_ranks(hung)} of {size} hung: the others waited for {them} in a collective"
        return Verdict(reason, hung[0], tuple(hung))
    unlike = [said.group() for end in ends for said in map(_UNLIKE.search, end.tail) if said is not None]
    if failed and unlike:
        return Verdict(unlike[0], failed[0])
    if failed and left:
        end = left[0]
        reason = f"rank {end.rank} of {size} was done while the others still had collectives to do"
        return Verdict(reason, end, hopeless=True)
    waits = [said.group() for end in ends for said in map(_WAITS.search, end.tail) if said is not None]
    if failed and len(waits) == size > 1:
        return Verdict(f"the ranks waited for each other: {'; '.join(waits)}", failed[0])
    if failed or not silent:
        end = [*failed, *ends][0]
        return Verdict(f"rank {end.rank} of {size} {end.how} after {end.seconds:.0f} s", end)
    end = silent[0]
    return Verdict(f"{_ranks(silent)} of {size} had not ended after {timeout:.0f} s", end, hopeless=True)


def _ranks(ends: Sequence[RankEnd]) -> str:
    numbers = ", ".join(str(end.rank) for end in sorted(ends, key=lambda end: end.rank))
    return f"rank{'s' * (len(ends) > 1)} {numbers}"


def report(ends: Sequence[RankEnd], timeout: float | None = None) -> str:
    """Report which rank ended a job and why, with its last lines; `ends` is in the order of ending."""
    found = verdict(ends, timeout)
    culprit = found.culprit
    lines = [f"the job was ended: {found.reason}"]
    if culprit.tail:
        lines += [f"the last lines of rank {culprit.rank}'s stderr:", *(f"  {line}" for line in culprit.tail)]
    others = [end for end in sorted(ends, key=lambda end: end.rank) if end is not culprit]
    lines += [f"rank {end.rank} {end.how}{' by the launcher' * end.ended_here}" for end in others]
    return "\n".join(lines)


_UNLIKE = re.compile(r"rank \d+ of \d+ during .*: the ranks make different collectives: [^;]+")
_WAITS = re.compile(
    r"rank \d+ of \d+ has waited \d+ s in \w+"
    r"|rank \d+ of \d+ lost its peers .*timed out: .* did not come within \d+ s to [^;]+"
)
_SAID = re.compile(r"has waited \d+ s in|CollectiveError|lost its peers|ranks make different collectives")
_LOST = re.compile(rf"{_SAID.pattern}|Horovod has been shut down|[Cc]onnection (closed|reset) by peer")


def _reason(end: RankEnd) -> str:
    """Return the last line of a rank's stderr, if it could write any."""
    return f": {end.tail[-1].strip()}" if end.code > 0 and end.tail else ""
