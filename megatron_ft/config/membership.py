"""Configuration of a job on the nodes of one membership, scheduled changes, and files with loads and placements.

An entry of ``testing.membership_schedule`` is a change such as ``lose(nodes=[2],before_iteration=5)``. The ranks of
these nodes leave or join before the iteration, without a fault. Tests compare a job that loses and adds nodes because
of failures with a job that has the same changes in its schedule. ``lose`` removes nodes. ``join`` adds nodes.
``change(lose=[1],join=[2],before_iteration=12)`` does both at once; a node in both lists is restarted, and its new
ranks have no state. ``change(lose=[],join=[],before_iteration=12)`` only computes a new placement. Several entries with
one iteration form several memberships, one after the other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_ft.config.findings import Findings
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.expert_loads import MAX_BYTES, ExpertLoads
from megatron_ft.serde import parse_call, parse_json, read_bytes
from megatron_ft.topology import Topology

_KEY = "testing.membership_schedule"
_KEYWORDS = {
    "lose": ("nodes", "before_iteration"),
    "join": ("nodes", "before_iteration"),
    "change": ("lose", "join", "before_iteration"),
}
_EXAMPLES = {
    "lose": "lose(nodes=[2],before_iteration=5)",
    "join": "join(nodes=[2],before_iteration=9)",
    "change": "change(lose=[1],join=[2],before_iteration=12)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """Nodes that leave and nodes that join before an iteration. A node in both tuples is restarted without state."""

    lose: tuple[int, ...] = ()
    """Numbers of the nodes that leave, ascending."""
    join: tuple[int, ...] = ()
    before_iteration: int
    """First iteration of the new membership, at least 1."""

    @classmethod
    def between(
        cls, before: Iterable[int], after: Iterable[int], joining: Iterable[int], before_iteration: int
    ) -> "MembershipChange":
        """Return the change from members ``before`` to members ``after``. Nodes in ``joining`` join without state."""
        lost = (set(before) - set(after)) | (set(before) & set(joining))
        joined = (set(after) - set(before)) | set(joining)
        return cls(lose=tuple(sorted(lost)), join=tuple(sorted(joined)), before_iteration=before_iteration)

    def to_text(self) -> str:
        """Write the change in the syntax of ``testing.membership_schedule``."""
        lose, join = (str(list(nodes)).replace(" ", "") for nodes in (self.lose, self.join))
        if self.lose and not self.join:
            return f"lose(nodes={lose},before_iteration={self.before_iteration})"
        if self.join and not self.lose:
            return f"join(nodes={join},before_iteration={self.before_iteration})"
        return f"change(lose={lose},join={join},before_iteration={self.before_iteration})"

    def after(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Return the members after the change, ascending. ``nodes`` are the members before the change."""
        return tuple(sorted(set(nodes) - set(self.lose) | set(self.join)))

    def summary(self) -> str:
        """Return a description of the change, for use in a log line."""
        leaving = [f"nodes {list(self.lose)} leave"] if self.lose else []
        joining = [f"nodes {list(self.join)} join"] if self.join else []
        what = " and ".join(leaving + joining) or "the placement is planned again"
        return f"{what} before iteration {self.before_iteration}"

    @classmethod
    def parse(cls, text: str) -> "MembershipChange":
        """Parse one entry of ``testing.membership_schedule``.

        Raises:
            ConfigError: the entry is not a call of ``lose``, ``join`` or ``change`` with all keywords as literals, the
                nodes are not ascending, or the iteration is below 1.
        """
        name, values = parse_call(_KEY, text, _KEYWORDS, " or ".join(_EXAMPLES.values()))
        if sorted(values) != sorted(_KEYWORDS[name]):
            keywords = " and ".join(_KEYWORDS[name])
            raise ConfigError.of(_KEY, text, f"must give {keywords}, each once, as in {_EXAMPLES[name]}")
        iteration = values.pop("before_iteration")
        nodes = {
            name if keyword == "nodes" else keyword: _node_list(text, value, may_be_empty=name == "change")
            for keyword, value in values.items()
        }
        if type(iteration) is not int or iteration < 1:
            raise ConfigError.of(_KEY, text, "must give before_iteration as a number of at least 1")
        return cls(before_iteration=iteration, **nodes)


def nodes_over_time(num_nodes: int, changes: Iterable[MembershipChange]) -> Iterator[tuple[int, ...]]:
    """Yield the nodes at the start of a job (0 to ``num_nodes`` - 1), then the nodes after each of ``changes``."""
    nodes = tuple(range(num_nodes))
    yield nodes
    for change in changes:
        nodes = change.after(nodes)
        yield nodes


def _node_list(text: str, nodes: object, *, may_be_empty: bool) -> tuple[int, ...]:
    if (
        not isinstance(nodes, list)
        or not (nodes or may_be_empty)
        or any(type(node) is not int or node < 0 for node in nodes)
    ):
        raise ConfigError.of(_KEY, text, "must give nodes as a list of their numbers, e.g. [2]")
    # A change has only one spelling: ``to_text`` writes ascending nodes.
    if nodes != sorted(set(nodes)):
        raise ConfigError.of(_KEY, text, "must name each node once, in ascending order")
    return tuple(nodes)


@dataclass
class MembershipConfig(JobConfig):
    """Configuration of a job, adapted to one membership, in which nodes can have different numbers of ranks."""

    places: tuple[int, ...] = ()
    """Index of each rank's node in ``member_domains``, the list of failure domains; see ``rank_places``."""

    @property
    def rank_places(self) -> tuple[int, ...]:
        return self.places


def config_of(job: JobConfig, nodes: Sequence[int], *, keeps_layout: bool | None = None) -> JobConfig:
    """Return ``job`` adapted to a membership. ``nodes`` contains the node number of each rank of the membership.

    Nodes keep the names of their failure domains; a node without a name is a domain of its own. If there are too few
    domains, ``placement.state_copies`` is lowered. If the layout is kept, only ``topology`` and this key change,
    because the number of nodes is the same. Otherwise ``placement.min_replicas`` and ``snapshot.num_peer_copies`` are
    also lowered if there are too few domains, and ``recovery.keep_layout`` is false in the result.

    Args:
        keeps_layout: whether the membership has the layout with which the job starts. Has an effect only with
            ``recovery.keep_layout``. None: true if the membership has as many ranks as the job at the start.
    """
    if keeps_layout is None:
        keeps_layout = len(nodes) == job.world_size
    keeps_layout = keeps_layout and job.recovery.keep_layout
    # In a kept layout, ``nodes`` keeps the order of ranks: a spare has the ranks of the lost node that it replaces.
    present = list(dict.fromkeys(nodes)) if keeps_layout else sorted(set(nodes))
    names = dict(enumerate(job.topology.failure_domains))
    domains = [names.get(node, f"node{node}") for node in present]
    topology = replace(job.topology, failure_domains=domains)
    if keeps_layout:
        kept, copies = replace(job, topology=topology), job.placement.state_copies
        if copies is None:
            return kept
        # A spare may be in the failure domain of another node.
        return replace(kept, placement=replace(job.placement, state_copies=min(copies, fewest_domains(kept))))
    place_of = {node: place for place, node in enumerate(present)}
    groups = {field.name: getattr(job, field.name) for field in fields(JobConfig)}
    config = MembershipConfig(
        **{
            **groups,
            "launch": replace(job.launch, num_nodes=len(present)),
            "topology": topology,
            # The layout is not kept, so no stage can replay alone: windows and logs belong to ranks of another layout.
            "recovery": replace(job.recovery, keep_layout=False),
            # ``derive_placement`` replaces this 1 by the number of ranks of a stage, which form one expert group.
            "parallel": replace(job.parallel, expert_model_parallel_size=1),
        },
        places=tuple(place_of[node] for node in nodes),
    )
    # Replicas and state copies must be in different domains of one stage. Window copies may be in any domain.
    num_domains, copies = fewest_domains(config), job.placement.state_copies
    return derive_placement(
        replace(
            config,
            placement=replace(
                job.placement,
                min_replicas=min(job.placement.min_replicas, num_domains),
                state_copies=None if copies is None else min(copies, num_domains),
            ),
            snapshot=replace(job.snapshot, num_peer_copies=min(job.snapshot.num_peer_copies, len(set(domains)) - 1)),
        )
    )


def fewest_domains(config: JobConfig) -> int:
    """Count the failure domains that contain ranks of each pipeline stage. Return the smallest of these numbers."""
    topology, domains = Topology.of(config.parallel, config.world_size), config.rank_domains
    # Every stage has to spread its replicas over domains, so the stage with the fewest domains decides.
    return min(
        len({domains[rank] for rank in topology.stage_ranks(stage)})
        for stage in range(topology.pipeline_model_parallel_size)
    )


def derive_placement(config: JobConfig) -> JobConfig:
    """Return ``config`` with the expert-parallel size and the number of replica slots per rank that the job uses, if
    ``placement.algorithm`` is given. Otherwise return ``config`` unchanged.

    With replica slots, all ranks of a pipeline stage form one expert-parallel group and have the same number of slots.
    By default, a stage has just enough slots for ``placement.min_replicas`` replicas of every expert.
    """
    placement, num_experts = config.placement, config.model.num_moe_experts or 0
    if placement.algorithm is None:
        return config
    stage_size = Topology.of(config.parallel, config.world_size).stage_size
    # A second replica on the same rank protects against no loss, so the default is at most one slot per expert.
    num_slots = placement.num_slots_per_rank or min(num_experts, -(-placement.min_replicas * num_experts // stage_size))
    return replace(
        config,
        parallel=replace(config.parallel, expert_model_parallel_size=stage_size),
        placement=replace(placement, num_slots_per_rank=num_slots),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledPlacement:
    """A placement that a file in ``placement.schedule`` contains."""

    path: str
    stages: tuple[Mapping[str, Any], ...]
    """Plan of each pipeline stage: the experts in the slots of each rank, as JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInputs:
    """Recorded expert loads and placements, read from files. A field is None or empty if no file is configured."""

    loads: ExpertLoads | None = None
    schedule: Mapping[int, ScheduledPlacement] = field(default_factory=dict)
    """Maps the first iteration that uses a placement to this placement."""
    trace: ExpertLoads | None = None

    @classmethod
    def read(cls, config: JobConfig) -> "JobInputs":
        """Read the files that ``placement.loads_file``, ``placement.schedule`` and ``model.router_trace_file`` name.

        Raises:
            ConfigError, DataError: a file or an entry is invalid; the message names the key. SeveralErrors: several
                files or entries are invalid.
        """
        found = Findings()
        loads = trace = None
        schedule: dict[int, ScheduledPlacement] = {}
        with found.collecting(at_fault=()):
            loads = read_first_loads(config)
        with found.collecting(at_fault=()):
            schedule = read_schedule(config)
        with found.collecting(at_fault=()):
            trace = read_trace(config) if config.model.router == "trace" else None
        found.raise_errors()
        return cls(loads=loads, schedule=schedule, trace=trace)


def read_first_loads(config: JobConfig) -> ExpertLoads | None:
    """Read the expert loads in ``placement.loads_file``; return None if the key is null."""
    path = config.placement.loads_file
    return None if path is None else _read_loads("placement.loads_file", path)


def read_trace(config: JobConfig) -> ExpertLoads:
    """Read the expert loads in ``model.router_trace_file``."""
    path = config.model.router_trace_file
    assert path is not None, "model.router_trace_file must be given with model.router=trace"
    return _read_loads("model.router_trace_file", path)


def read_schedule(config: JobConfig) -> dict[int, ScheduledPlacement]:
    """Read the files of ``placement.schedule``. Map the first iteration of each placement to the placement.

    Raises:
        ConfigError: an entry is not ITERATION:FILE, or an iteration occurs twice.
        DataError: a file cannot be read or does not contain placements.
    """
    schedule: dict[int, ScheduledPlacement] = {}
    for entry in config.placement.schedule:
        number, found, path = entry.partition(":")
        if not found or not number.isdecimal() or int(number) < 1:
            raise ConfigError.of("placement.schedule", entry, "must be ITERATION:FILE with an iteration of at least 1")
        if int(number) in schedule:
            raise ConfigError.of("placement.schedule", entry, f"must be the only entry for iteration {int(number)}")
        schedule[int(number)] = ScheduledPlacement(path=path, stages=_stages(path))
    return schedule


def _read_loads(key: str, path: str) -> ExpertLoads:
    try:
        return ExpertLoads.read(Path(path))
    except DataError as error:
        raise DataError(f"{key}={path}: {error}") from None


def _stages(path: str) -> tuple[Mapping[str, Any], ...]:
    try:
        # The size is limited before parsing, because the key may name any file of the machine.
        document = parse_json(read_bytes(Path(path), max_bytes=MAX_BYTES))
    except DataError as error:
        raise DataError(f"placement.schedule={path}: {error}") from None
    except ValueError as error:
        raise DataError(f"placement.schedule={path}: is not JSON: {error}") from None
    stages = document.get("stages") if isinstance(document, dict) else None
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise DataError(f'placement.schedule={path}: must be {{"stages": [a placement for each pipeline stage]}}')
    return tuple(stages)
