"""The membership changes that a configuration asks for, by iteration."""

from collections.abc import Sequence

from megatron_ft.config.membership_schedule import MembershipChange, parse_membership_change

__all__ = ["MembershipChange", "change_before", "parse_membership_change"]


def change_before(schedule: Sequence[str], iteration: int) -> MembershipChange | None:
    """Which nodes leave at the boundary before ``iteration``.

    Args:
        schedule: ``launch.membership_schedule``, checked.
    """
    changes = map(parse_membership_change, schedule)
    return next((change for change in changes if change.before_iteration == iteration), None)
