"""Tests that inputs which arrived before a time are processed before that time passes, and that each call waits for its
own input."""

import threading

from megatron_ft.control.controller.server import Item, Posted, _Inbox
from megatron_ft.control.membership.events import NodeJoined, Tick


class Clock:
    """Clock whose time the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_came_in_time_is_taken_first_however_late_it_is() -> None:
    clock = Clock()
    inbox = _Inbox(clock)
    early, late = Item(None, {"n": 1}), Item(None, {"n": 2})
    inbox.put([early])
    clock.now = 9.0
    inbox.post(NodeJoined(1), 5)
    clock.now = 10.0
    inbox.put([late])
    clock.now = 100.0
    assert inbox.take(10.0) is early
    assert inbox.take(10.0) == Posted(NodeJoined(1), 9.0, 5)
    assert inbox.take(10.0) == Posted(Tick(), 10.0), "the time has come, and nothing that came before is left"
    assert inbox.take(10.0) == Posted(Tick(), 10.0)
    assert inbox.take(10.1) is late
    assert inbox.take(50.0) == Posted(Tick(), 100.0), "nothing came until now"


def test_who_takes_waits_for_what_comes() -> None:
    inbox = _Inbox(Clock())
    item = Item(None, {})
    threading.Timer(0.05, inbox.put, args=([item],)).start()
    assert inbox.take(20.0) is item


def test_a_closed_inbox_keeps_nobody_waiting() -> None:
    inbox = _Inbox(Clock())
    items = [Item(None, {}) for _ in range(4)]
    inbox.put(items[:3])
    assert isinstance(inbox.take(0.0), Posted), "the first one came too late and is put by"
    inbox.close()
    inbox.put(items[3:])
    assert all(item.has_effect.is_set() for item in items)


def test_whoever_waits_gives_signs_and_wakes_at_the_effect() -> None:
    item, signs = Item(None, {}), threading.Semaphore(0)
    threading.Thread(target=lambda: [signs.acquire(timeout=10) for _ in range(3)] and item.has_effect.set()).start()
    assert item.wait(10.0, 0.01, signs.release)
    assert not Item(None, {}).wait(0.02, 0.01, signs.release)
