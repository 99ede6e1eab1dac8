"""Two processes that greet: who knows the secret gets in, and nobody between them can say anything."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest

from gmeta.core.collectives.wire import Callers, SignedLink

SECRET = b"a secret of some length"
HELLO, PROOF = 64, 32  # bytes of a greeting's parts
HEAD, TAIL = 40, 32  # bytes around a message


def called(link: socket.socket, **options: Any) -> SignedLink:
    return SignedLink(link, SECRET, b"test", called=True, **options)


def caller(link: socket.socket, **options: Any) -> SignedLink:
    return SignedLink(link, SECRET, b"test", called=False, **options)


def both(one: Callable[[], Any], other: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, at the same time."""

    def run(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (OSError, EOFError) as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return [each.result() for each in (threads.submit(run, one), threads.submit(run, other))]


def test_messages_of_any_size_go_both_ways() -> None:
    ours, theirs = socket.socketpair()
    a, b = both(lambda: caller(ours), lambda: called(theirs))
    large = np.random.default_rng(0).bytes(3 << 20)
    for parts in ([b""], [b"a", b"", b"bc"], [large[:5], memoryview(large)]):
        for sender, receiver in ((a, b), (b, a)):
            _, found = both(lambda s=sender, p=parts: s.send(p), receiver.receive)
            assert bytes(found) == b"".join(bytes(part) for part in parts)
            assert not found.readonly
    with pytest.raises(TimeoutError):
        a.receive(0.01)
    b.close()
    with pytest.raises(EOFError):
        a.receive()
    a.close()


@pytest.mark.parametrize(
    "change", [{"secret": SECRET + b"x"}, {"purpose": b"tests"}, {"expected": {b"x" * 16}}]
)
def test_who_does_not_fit_is_refused_on_both_sides(change: dict[str, Any]) -> None:
    ours, theirs = socket.socketpair()
    given = {"secret": SECRET, "purpose": b"test", **change}
    for error in both(
        lambda: SignedLink(ours, **given, called=False), lambda: called(theirs, name=b"y" * 16)
    ):
        assert isinstance(error, ConnectionError)
        assert str(error) in {
            "it has another key",
            "it isn't the one that was announced here, which has ended",
            "it doesn't greet like a process of this gmeta",
        }
    assert ours.fileno() == theirs.fileno() == -1


def says(data: bytes, pause: float = 0.0) -> Callable[[socket.socket], None]:
    def work(link: socket.socket) -> None:
        for byte in [data[i : i + 1] for i in range(len(data))] if pause else [data]:
            link.sendall(byte)
            time.sleep(pause)
        while link.recv(1000):
            pass

    return work


STRANGERS = {
    "nothing": says(b""),
    "a request": says(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 200),
    "an older gmeta": says(b"\x00\x00\x00\x1f#CHALLENGE#" + b"x" * 60),
    "a long message": says(b"\xff" * 200),
    "a byte now and then": says(b"gmeta greeting 1" + b"x" * 100, 0.02),
    "half a greeting": says(b"gmeta greeting 1"),
    "no proof": says(b"gmeta greeting 1" + b"x" * (HELLO - 16 + PROOF)),
    "an end": lambda link: link.close(),
}


@pytest.mark.parametrize("said", STRANGERS)
@pytest.mark.parametrize("side", [called, caller])
def test_strangers_are_refused_in_time(said: str, side: Callable[..., SignedLink]) -> None:
    ours, theirs = socket.socketpair()
    began = time.monotonic()

    def stranger() -> None:
        with theirs, suppress(OSError):
            STRANGERS[said](theirs)

    def refused() -> float:
        with pytest.raises(ConnectionError, match=r"it (doesn't greet|has another key)"):
            side(ours, seconds=0.3)
        return time.monotonic() - began

    found = both(refused, stranger)
    assert found[0] < 3  # and not for as long as the stranger likes


def test_nothing_is_revealed_to_who_has_not_proved_anything() -> None:
    ours, theirs = socket.socketpair()

    def stranger() -> bytes:
        with theirs:
            theirs.sendall(b"gmeta greeting 1" + b"x" * (HELLO - 16 + PROOF))
            heard = b""
            while part := theirs.recv(1000):
                heard += part
        return heard

    _, heard = both(lambda: called(ours, seconds=5), stranger)
    assert len(heard) == HELLO  # its own hello, and no proof that could be searched for the secret


def test_a_captured_greeting_is_worth_nothing() -> None:
    heard, _ = relay(lambda data: [data], lambda a, b: a.send([b"run this"]))
    ours, theirs = socket.socketpair()

    def again() -> None:
        with theirs:
            theirs.sendall(heard)
            time.sleep(0.1)

    error, _ = both(lambda: called(ours), again)
    assert isinstance(error, ConnectionError)


def test_a_mirror_is_refused() -> None:
    ours, theirs = socket.socketpair()

    def mirror() -> None:
        with theirs:
            while data := theirs.recv(1000):
                theirs.sendall(data)

    error, _ = both(lambda: caller(ours), mirror)
    assert str(error) == "it has another key"


def relay(
    change: Callable[[bytes], list[bytes]], work: Callable[[SignedLink, SignedLink], Any]
) -> tuple[bytes, Any]:
    """Greet through a stranger who forwards all; then it changes what the caller sends.

    Args:
      change: Gets what the caller sends at once, behind the greeting; what it sends in its place.
      work: Gets both sides.

    Returns:
      All that the caller has sent, and what ``work`` returned.
    """
    (ours, near), (far, theirs) = socket.socketpair(), socket.socketpair()
    heard, greeted = [], threading.Event()

    def forward(source: socket.socket, to: socket.socket, is_caller: bool) -> None:
        while True:
            try:
                data = source.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                return
            if is_caller:
                heard.append(data)
            for part in change(data) if is_caller and greeted.is_set() else [data]:
                with suppress(OSError):
                    to.sendall(part)

    threads = [
        threading.Thread(target=forward, args=way, daemon=True)
        for way in ((near, far, True), (far, near, False))
    ]
    for thread in threads:
        thread.start()
    a, b = both(lambda: caller(ours), lambda: called(theirs))
    greeted.set()
    with closing(a), closing(b):
        found = work(a, b)
    for link in (near, far):
        link.close()
    return b"".join(heard), found


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


ONE, TWO = HEAD + 3 + TAIL, HEAD + 5 + TAIL  # messages of 3 and 5 bytes
FORGED = {
    "a byte of the size": lambda data: flip(data, 0),
    "a size of an exabyte": lambda data: (1 << 60).to_bytes(8, "little") + data[8:],
    "a byte of the head's signature": lambda data: flip(data, 20),
    "a byte of the message": lambda data: flip(data, HEAD),
    "a byte of its signature": lambda data: flip(data, HEAD + 3),
    "a message before": lambda data: data[ONE:] + data[:ONE],
    "a message less": lambda data: data[ONE:],
    "another body": lambda data: data[:HEAD] + data[ONE + HEAD : ONE + HEAD + 3] + data[HEAD + 3 :],
    "a foreign message": lambda data: b"\x03" + bytes(HEAD - 1) + b"run" + bytes(TAIL) + data,
}


@pytest.mark.parametrize("forged", FORGED)
def test_who_forwards_the_connection_can_not_say_anything(forged: str) -> None:
    held = bytearray()

    def change(data: bytes) -> list[bytes]:
        held.extend(data)
        return [FORGED[forged](bytes(held))] if len(held) == ONE + TWO else []

    def work(a: SignedLink, b: SignedLink) -> str:
        a.send([b"one"])
        a.send([b"twice"])
        with pytest.raises((ConnectionError, EOFError)) as raised:
            b.receive(5)
        return str(raised.value)

    _, said = relay(change, work)
    assert said == "what it sent isn't signed by it: someone changes the connection"


def test_a_message_counts_once_and_in_its_direction() -> None:
    def twice(a: SignedLink, b: SignedLink) -> None:
        a.send([b"one"])
        assert bytes(b.receive(5)) == b"one"
        with pytest.raises(ConnectionError, match="isn't signed by it"):
            b.receive(5)

    relay(lambda data: [data, data], twice)
    ours, theirs = socket.socketpair()
    a, b = both(lambda: caller(ours), lambda: called(theirs))
    a.send([b"one"])
    theirs.sendall(theirs.recv(1000))  # it comes back to where it came from
    with pytest.raises(ConnectionError, match="isn't signed by it"):
        a.receive(5)
    a.close()
    b.close()


def test_a_cut_message_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    a, b = both(lambda: caller(ours), lambda: called(theirs))
    a.send([b"one"])
    data = theirs.recv(1000)
    for end in (10, HEAD, HEAD + 3, HEAD + 20):
        near, far = socket.socketpair()
        b._link = far
        near.sendall(data[:end])
        near.close()
        with pytest.raises(EOFError, match="in the middle of a message"):
            b.receive(5)


def test_too_many_callers_end_the_oldest() -> None:
    callers, pairs = Callers(3), [socket.socketpair() for _ in range(5)]
    for ours, _ in pairs[:3]:
        callers.admit(ours)
    callers.leave(pairs[1][0])
    for ours, _ in pairs[3:]:
        callers.admit(ours)
    ended = []
    for _, theirs in pairs:
        theirs.settimeout(0.01)
        try:
            ended.append(theirs.recv(1) == b"")
        except TimeoutError:
            ended.append(False)
    assert ended == [True, False, False, False, False]
    for pair in pairs:
        for link in pair:
            link.close()
