"""Tests an agent's queue of reports to the controller."""

import threading

from megatron_ft.control.node.ranks import HIGH_WATER_ITEMS, LOW_WATER_ITEMS, Outbox


def test_items_stay_until_they_are_acknowledged_and_keep_their_numbers() -> None:
    outbox = Outbox(lambda: None)
    for number in range(5):
        outbox.put({"n": number})
    assert outbox.wait_batch() == (0, [{"n": number} for number in range(5)])
    assert outbox.wait_batch()[0] == 0, "not acknowledged: the same again"
    outbox.acknowledge(3)
    assert outbox.wait_batch() == (3, [{"n": 3}, {"n": 4}])
    outbox.acknowledge(3)
    outbox.acknowledge(5)
    outbox.put({"n": 5})
    assert outbox.wait_batch() == (5, [{"n": 5}])


def test_it_is_full_from_high_to_low_water_and_says_when_it_has_drained() -> None:
    drained = []
    outbox = Outbox(lambda: drained.append(True))
    for number in range(HIGH_WATER_ITEMS):
        assert not outbox.is_full
        outbox.put({"n": number})
    assert outbox.is_full
    outbox.acknowledge(HIGH_WATER_ITEMS - LOW_WATER_ITEMS - 1)
    assert outbox.is_full and not drained
    outbox.acknowledge(HIGH_WATER_ITEMS - LOW_WATER_ITEMS)
    assert not outbox.is_full and drained == [True]


def test_batches_are_bounded_by_items_and_bytes() -> None:
    outbox = Outbox(lambda: None)
    for number in range(1000):
        outbox.put({"text": "x" * (100_000 if number < 100 else 10)})
    first, items = outbox.wait_batch()
    assert (first, len(items)) == (0, 41)
    outbox.acknowledge(100)
    assert len(outbox.wait_batch()[1]) == 500


def test_an_item_larger_than_a_batch_goes_alone() -> None:
    outbox = Outbox(lambda: None)
    outbox.put({"text": "x" * 5_000_000})
    outbox.put({"n": 1})
    assert len(outbox.wait_batch()[1]) == 1


def test_a_sender_wakes_up_when_something_comes() -> None:
    outbox, batches = Outbox(lambda: None), []
    sender = threading.Thread(target=lambda: batches.append(outbox.wait_batch()))
    sender.start()
    outbox.put({"n": 0})
    sender.join(timeout=5)
    assert batches == [(0, [{"n": 0}])]
