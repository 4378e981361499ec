"""Serves the calls with which administrators read the job's status, or let a node leave or join."""

from collections.abc import Callable, Sequence

from megatron_ft.control.detector import Detector, Place
from megatron_ft.control.membership.events import AddRequested, DrainRequested, MachineEvent
from megatron_ft.control.membership.joining import NodeRules
from megatron_ft.control.membership.state import MembershipPolicy, State, keeps_layout
from megatron_ft.errors import ControlError
from megatron_ft.framing import Message


class AdminService:
    """Methods that the controller serves to administrators. They run in gRPC's threads, and only read the state or
    post events."""

    def __init__(
        self,
        policy: MembershipPolicy,
        *,
        read_state: Callable[[], State],
        detector: Detector,
        ask: Callable[[MachineEvent], None],
        clock: Callable[[], float],
    ) -> None:
        """Store two functions of the controller: ``read_state`` returns the present state, and ``ask`` posts an event
        and returns when the controller has recorded the event."""
        self._policy = policy
        self._read_state = read_state
        self._detector = detector
        self._ask = ask
        self._clock = clock

    @property
    def methods(self) -> dict[str, Callable[[Message], Message]]:
        """Return a map from the name of each call to the function that serves the call."""
        return {"status": self._status, "drain": self._drain, "add": self._add}

    # ``State`` is immutable, so a call reads a consistent state without a lock, even if the controller replaces it.
    def _status(self, _request: Message) -> Message:
        state, rules = self._read_state(), NodeRules(self._policy)
        iteration = max((place.iteration for place in self._places(state.members)), default=0)
        return {
            "generation": state.generation,
            "phase": state.phase.value,
            "members": list(state.members),
            "waiting": sorted(state.nodes.waiting),
            "lost": sorted(state.nodes.lost),
            "draining": sorted(state.nodes.draining),
            "nodes": {str(node): self._node(node) for node in sorted(state.nodes.registered)},
            "num_reforms": state.num_reforms,
            "keeps_layout": keeps_layout(self._policy, state),
            "replacements": sorted(rules.replacements(state)),
            "worn": [node for node in state.members if rules.is_worn(state, node, iteration)],
        }

    def _node(self, node: int) -> Message:
        behind = min(self._places([node]), key=lambda place: (place.iteration, place.step), default=None)
        seconds = self._detector.seconds_since_word(node, self._clock())
        return {
            "iteration": None if behind is None else behind.iteration,
            "phase": None if behind is None else behind.phase,
            "seconds_since_word": None if seconds is None else max(0.0, seconds),
        }

    def _places(self, nodes: Sequence[int]) -> list[Place]:
        places = [self._detector.place(rank) for node in nodes for rank in self._policy.ranks_of(node)]
        return [place for place in places if place is not None]

    def _drain(self, request: Message) -> Message:
        node = self._known(request)
        self._refuse(NodeRules(self._policy).refuse_drain(self._read_state(), node))
        # ``_ask`` returns once the request is in the journal, so an accepted request survives this controller.
        self._ask(DrainRequested(node))
        state = self._read_state()
        if state.nodes.is_member(node) and node not in state.nodes.draining:  # another request came first
            self._refuse(NodeRules(self._policy).refuse_drain(state, node))
        return {}

    def _add(self, request: Message) -> Message:
        node = self._known(request)
        self._refuse(NodeRules(self._policy).refuse_add(self._read_state(), node))
        self._ask(AddRequested(node))
        return {}

    def _known(self, request: Message) -> int:
        node, most = int(request["node"]), self._policy.most_nodes
        if not 0 <= node < most:
            raise ControlError(f"node {node}: must be from 0 to {most - 1}, the numbers of the job's nodes")
        return node

    @staticmethod
    def _refuse(reason: str | None) -> None:
        if reason is not None:
            raise ControlError(reason)
