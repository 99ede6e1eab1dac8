"""Reads the pieces of an epoch from workers: several lanes at once, each piece exactly once.

Piece p belongs to lane p mod L, and a lane reads its pieces one after another, from any worker. A lane
counts the elements of its piece that arrived. Where a worker is lost, or another one has less to do, the lane
asks another worker for the rest of the piece, from that count on. So no element is lost and none comes twice,
and the elements of a lane depend on neither workers nor time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from gmeta.core.version import __version__
from gmeta.io.readers.read_options import OneEpoch
from gmeta.io.service.channel import Channel
from gmeta.io.service.worker_pool import WorkerPool
from gmeta.io.service.worker_server import decode, digest_of

_LOSSES = 3
"""How many workers in a row may be lost at one element; then it is the element that ends them."""


class Lanes:
    """The lanes of one iteration over an epoch.

    Args:
      pool: The workers.
      function: The pickled function from a piece to a dataset.
      lanes: For each lane the pieces that it reads, each from where it begins.
      ahead: The most elements of a lane that wait here.
      patience: Seconds after which a worker that sends nothing counts as lost.

    Attributes:
      news: Is notified when a lane has something, or ends.
    """

    def __init__(
        self,
        pool: WorkerPool,
        function: bytes,
        lanes: Sequence[Sequence[OneEpoch]],
        *,
        ahead: int,
        patience: float,
    ) -> None:
        self.news = threading.Condition()
        self._pool, self._function, self._digest = pool, function, digest_of(function)
        self._ahead, self._patience = ahead, patience
        self._waiting: list[deque[Any]] = [deque() for _ in lanes]
        self._channels: dict[int, Channel] = {}
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._made = 0.0
        for number, pieces in enumerate(lanes):
            threading.Thread(target=self._run, args=(number, pieces), daemon=True).start()

    def look(self, lane: int) -> tuple[int, list[Any] | None] | None:
        """Return the next element of a lane, if it has arrived; `news` must be held.

        Returns:
          (piece, arrays of an element); (piece, None) at the piece's end; (-1, None) at the lane's end, which
          stays; None: nothing yet.

        Raises:
          RuntimeError: No worker can be reached, or reading failed.
        """
        waiting = self._waiting[lane]
        if not waiting:
            if self._failure is not None:
                raise self._failure
            return None
        if waiting[0][0] == -1:
            return waiting[0]
        self.news.notify_all()
        return waiting.popleft()

    def made(self) -> float:
        """Return the seconds that workers spent on elements since the last call."""
        with self.news:
            made, self._made = self._made, 0.0
            return made

    def close(self) -> None:
        """Stop reading."""
        self._ended.set()
        with self.news:
            self.news.notify_all()
            channels = list(self._channels.values())
        for channel in channels:
            channel.hang_up()

    def _run(self, lane: int, pieces: Sequence[OneEpoch]) -> None:
        left, losses = deque(pieces), 0
        try:
            address: str | None = None
            while left:
                begin = left[0]
                here = address or self._pool.take(self._ended)
                address, lost = self._read(lane, here, left)
                if address is None:
                    self._pool.give_back(here, lost)
                if self._ended.is_set():
                    return
                losses = losses + 1 if left and left[0] == begin and isinstance(lost, _LostError) else 0
                if losses >= _LOSSES:
                    raise RuntimeError(
                        f"gmeta: distribute: {losses} workers in a row were lost at {_place(begin)}, the "
                        f"last one {here} ({lost}); see its output: out of memory, or a crash there? "
                        "A slow one needs more `patience`"
                    )
            self._put(lane, (-1, None))
        except BaseException as error:
            with self.news:
                self._failure = error
                self.news.notify_all()

    def _read(self, lane: int, address: str, left: deque[OneEpoch]) -> tuple[str | None, OSError | None]:
        """Read pieces from one worker; ``left`` is what remains.

        Returns:
          The worker that continues, if another one should; and why this one was lost, if it was.
        """
        reached = False
        try:
            channel = self._pool.call(address)
            reached = True
            with self.news:
                self._channels[lane] = channel
            try:
                moved: str | None = None
                while left and not self._ended.is_set() and moved is None:
                    channel.send((__version__, "read", self._digest, asdict(left[0])))
                    moved = self._read_piece(lane, address, channel, left)
                return moved, None
            finally:
                with self.news:
                    self._channels.pop(lane, None)
                channel.close()
        except (OSError, EOFError) as error:
            lost = _LostError(str(error) or "its connection ended")
            return None, lost if reached else ConnectionError(str(error))

    def _read_piece(self, lane: int, address: str, channel: Channel, left: deque[OneEpoch]) -> str | None:
        """Read a piece to its end, or until the worker that is returned should continue."""
        while not self._ended.is_set():
            kind, *given = channel.receive(self._patience)
            if kind == "end":
                self._put(lane, (left.popleft().number, None))
                return self._pool.move(address) if left else None
            if kind == "error":
                text = given[0] if "gmeta: " in given[0] else f"gmeta: distribute: {given[0]}"
                raise RuntimeError(f"{text} (the worker {address}, at {_place(left[0])})")
            if kind == "function":
                channel.send(self._function)
                continue
            made, parts = given
            left[0] = replace(left[0], taken=left[0].taken + 1)
            self._put(lane, (left[0].number, [decode(part) for part in parts]), made)
            if (moved := self._pool.move(address)) is not None:
                return moved
        return None

    def _put(self, lane: int, item: tuple[int, list[Any] | None], made: float = 0.0) -> None:
        with self.news:
            self._made += made
            self._waiting[lane].append(item)
            self.news.notify_all()
            while len(self._waiting[lane]) > self._ahead and not self._ended.is_set():
                self.news.wait()


class _LostError(OSError):
    """A worker that was reached, and lost while it read."""


def _place(piece: OneEpoch) -> str:
    return f"element {piece.taken} of piece {piece.number} of epoch {piece.epoch}"
