"""Tests that retention deletes only the checkpoints that it may delete."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.planning.retention import RetentionPolicy


def named(*iterations: int) -> list[tuple[int, str]]:
    return [(iteration, f"iter_{iteration:07d}") for iteration in iterations]


def test_keeps_the_last_and_every_nth() -> None:
    policy = RetentionPolicy(keep_last=2, keep_every_iterations=30)
    assert policy.removable(named(10, 20, 30, 40, 50)) == ("iter_0000010", "iter_0000020")


def test_zero_keeps_all() -> None:
    assert RetentionPolicy(keep_last=0).removable(named(1, 2, 3)) == ()


def test_a_checkpoint_in_use_is_kept() -> None:
    policy = RetentionPolicy(keep_last=1)
    assert policy.removable(named(10, 20, 30), in_use=("iter_0000010",)) == ("iter_0000020",)


def test_a_later_attempt_is_newer() -> None:
    both = [(10, "iter_0000010"), (10, "iter_0000010.1")]
    assert RetentionPolicy(keep_last=1).removable(both) == ("iter_0000010",)


@given(
    st.lists(st.integers(0, 100), unique=True, min_size=1),
    st.integers(0, 5),
    st.integers(0, 10),
)
def test_never_removes_the_newest_nor_too_many(iterations: list[int], keep_last: int, every: int) -> None:
    removed = RetentionPolicy(keep_last=keep_last, keep_every_iterations=every).removable(named(*iterations))
    kept = {name for _, name in named(*iterations)} - set(removed)
    assert f"iter_{max(iterations):07d}" in kept
    assert len(kept) >= min(len(iterations), max(1, keep_last))
    assert all(int(name[5:]) % every for name in removed) if every else True
