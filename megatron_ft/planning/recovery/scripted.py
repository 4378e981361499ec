"""Memberships of ``testing.membership_schedule``: a pure function of the configuration, the same on every rank."""

from collections.abc import Sequence

from megatron_ft.config.membership_schedule import MembershipChange, nodes_over_time
from megatron_ft.planning.recovery.membership import NextMembership
from megatron_ft.planning.recovery.target import Target


def scripted_memberships(
    changes: Sequence[MembershipChange], num_nodes: int, ranks_per_node: int
) -> tuple[NextMembership, ...]:
    """Return the memberships after generation 0, which has all nodes. All use one store, so none has its own
    address."""
    nodes = list(nodes_over_time(num_nodes, changes))
    return tuple(
        _following(generation, change, nodes[generation - 1], nodes[generation], ranks_per_node)
        for generation, change in enumerate(changes, 1)
    )


def _following(
    generation: int, change: MembershipChange, before: Sequence[int], after: Sequence[int], ranks_per_node: int
) -> NextMembership:
    ranks, staying = range(ranks_per_node), set(before) - set(change.lose)
    following = NextMembership(
        generation=generation,
        previous_ranks=tuple(
            # A node that is lost and joins in one change comes back without state: it counts as joining.
            before.index(node) * ranks_per_node + local if node in staying else None
            for node in after
            for local in ranks
        ),
        nodes=tuple(node for node in after for _ in ranks),
        target=Target(iteration=change.before_iteration - 1, vote=None),
        master_addr="",
        master_port=0,
        reason=f"scheduled: {change.summary()}",
    )
    following.validate()
    return following
