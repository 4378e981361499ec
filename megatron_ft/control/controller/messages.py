"""What an agent may deliver to the controller of its ranks; the rest is refused."""

from collections.abc import Mapping

from megatron_ft.control.controller.message_shapes import check_shape
from megatron_ft.control.membership.state import MembershipPolicy
from megatron_ft.errors import ControlError, RecoveryError
from megatron_ft.framing import Message
from megatron_ft.planning.recovery.target import Position

_NUMBERS = (int, float, bool)

Members = Mapping[int, tuple[int, ...]]
"""Generation to the nodes of its membership."""


def check_item(policy: MembershipPolicy, members: Members, node: int, item: Message) -> None:
    """Refuse an item that is malformed or speaks for another node's ranks.

    Raises:
        ControlError: says why.
    """
    check_shape(item)
    rank, generation = item["rank"], item["generation"]
    if rank not in policy.ranks_of(node):
        raise ControlError(f"rank {rank} is not of node {node}")
    may_speak = node in members.get(generation, ())
    if not may_speak and (item["op"] == "broken" or generation not in members):
        raise ControlError(f"rank {rank}: node {node} is not of generation {generation}")
    if item["op"] == "broken":
        _check_position(item, rank, policy.number_among(members[generation], rank))


def _check_position(item: Message, rank: int, number: int) -> None:
    """Refuse a position that is none, or another rank's."""
    generation = int(item["generation"])
    try:
        position = Position.from_json(item["position"])
        whole = (position.rank, position.generation, position.completed, position.contributed)
        numbers = () if position.vote is None else tuple(position.vote.to_record().values())
        if any(type(value) is not int for value in whole) or any(type(n) not in _NUMBERS for n in numbers):
            raise TypeError(f"not all of {(*whole, *numbers)} are numbers")
        if type(position.has_state) is not bool:
            raise TypeError(f"has_state is {position.has_state!r}")
        position.validate()
    except (KeyError, TypeError, ValueError, AttributeError, RecoveryError) as error:
        raise ControlError(f"rank {rank}: malformed position: {error!r}") from None
    if (position.rank, position.generation) != (number, generation):
        raise ControlError(f"rank {number} of generation {generation} speaks for {position}")
