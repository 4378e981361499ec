"""Tests the source from which a started job continues."""

from megatron_ft.planning.recovery.sources import RecoverySource, StoredWindow, Where


def window(
    start: int, where: Where = "own", node: int = 0, *, complete: bool = True, generation: int = 0
) -> StoredWindow:
    held = 3 if complete else 2
    return StoredWindow(
        start_iteration=start, num_slices=3, num_held=held, generation=generation, where=where, node=node
    )


def test_the_newest_window_that_every_rank_has_is_taken() -> None:
    source = RecoverySource.choose([[window(4), window(7)], [window(4)]], checkpoint_iteration=2)
    assert (source.kind, source.iteration) == ("memory", 6)
    assert source.declined == ("memory window of iteration 7: no complete window of rank 1",)
    source.validate()


def test_nodes_that_did_not_answer_are_named_with_a_window_in_memory_that_a_rank_lacks() -> None:
    held = [[window(7), window(4), window(1, "persisted", -1)], [window(4)]]
    source = RecoverySource.choose(held, None, unreachable=["node 2 did not list its windows: timed out"])
    lacking = "memory window of iteration 7: no complete window of rank 1; node 2 did not list its windows: timed out"
    assert (source.iteration, source.declined) == (6, (lacking,))
    source = RecoverySource.choose([held[0][2:], []], None, unreachable=["node 2 did not list its windows: timed out"])
    assert source.declined == ("persisted window of iteration 1: no complete window of rank 1",)


def test_a_window_with_a_missing_slice_does_not_count() -> None:
    source = RecoverySource.choose([[window(7, complete=False), window(4)]], checkpoint_iteration=None)
    assert source.iteration == 6


def test_memory_of_the_own_node_comes_before_a_peers_and_before_storage() -> None:
    held = [[window(4, "persisted", -1), window(4, "copy", 2), window(4, "own", 1)], [window(4, "copy", 2)]]
    source = RecoverySource.choose(held, checkpoint_iteration=None)
    assert [(place.where, place.node) for place in source.places] == [("own", 1), ("copy", 2)]


def test_ranks_never_mix_memory_and_storage() -> None:
    held = [[window(4), window(1, "persisted", -1)], [window(4, "persisted", -1), window(1, "persisted", -1)]]
    source = RecoverySource.choose(held, checkpoint_iteration=None)
    assert (source.kind, source.iteration) == ("persisted", 3)


def test_a_checkpoint_as_new_as_the_window_needs_no_replay() -> None:
    source = RecoverySource.choose([[window(4)]], checkpoint_iteration=6)
    assert (source.kind, source.iteration) == ("checkpoint", 6)
    assert "as new" in source.declined[0]


def test_reasons_of_windows_that_are_no_longer_listed_are_kept() -> None:
    held = [[window(4, "persisted", -1)]]
    source = RecoverySource.choose(held, None, reasons=["memory window of iteration 4: damaged"])
    assert (source.kind, source.declined) == ("persisted", ("memory window of iteration 4: damaged",))


def test_nothing_is_a_start_from_iteration_0() -> None:
    assert RecoverySource.choose([[], []], None) == RecoverySource(kind="nothing", iteration=0)


def test_a_source_is_summed_up_with_its_last_iteration() -> None:
    assert "iteration 6" in RecoverySource.choose([[window(4)], [window(4)]], None).summary()


def test_windows_of_two_generations_are_not_one() -> None:
    held = [[window(7, generation=1), window(4)], [window(7), window(4)]]
    assert RecoverySource.choose(held, None).iteration == 6
    assert RecoverySource.choose([[window(7), window(7, generation=1)]], None).places[0].generation == 1
