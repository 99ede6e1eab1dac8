"""An interrupt that foreign code swallows is raised again."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest

from gmeta.core.terminal import Interrupts, remember_interrupts


@pytest.fixture(autouse=True)
def heard():
    """The tests hear interrupts, even in a job that ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_raised_and_once_more_where_it_was_swallowed():
    with remember_interrupts() as interrupts:
        interrupts.raise_again()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupts.came
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_again()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_blocks_within_each_other_all_note_it():
    with remember_interrupts() as outer:
        with remember_interrupts() as inner, contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert inner.came
        assert outer.came


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with remember_interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
    assert not interrupts.came
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_notes_nothing():
    seen: list[Interrupts] = []

    def work() -> None:
        with remember_interrupts() as interrupts:
            seen.append(interrupts)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [each.came for each in seen] == [False]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
