"""Describes the position of each rank in the parallel groups (Megatron's rank order), its node and failure domain."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_ft.config.job import ParallelConfig
from megatron_ft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coordinates:
    """Position of a rank in each parallel group, counted from 0."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    expert_dp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of the parallel groups, in Megatron's rank order ``tp-cp-ep-dp-pp``.

    A pipeline stage is a contiguous block of TP * CP * DP ranks. Within a stage TP varies fastest, then CP, then DP; in
    expert layers expert TP varies fastest, then EP, then expert DP.
    """

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> "Topology":
        """Make the topology of ``world_size`` ranks.

        Raises:
            ConfigError: a group size is below 1, or does not divide the number of ranks of the job or of a stage.
        """
        topology = cls(
            world_size=world_size,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size or 1,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
        )
        topology.validate()
        return topology

    def validate(self) -> None:
        """Check the constraints of Megatron's ``parallel_state.initialize_model_parallel`` on the group sizes."""
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError.of(_key(name), getattr(self, name), "must be at least 1")
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        sizes = {name: getattr(self, name) for name in names}
        tp, pp, cp = sizes.values()
        if self.world_size % (tp * cp * pp):
            raise ConfigError.of(
                "launch.num_nodes * launch.ranks_per_node",
                self.world_size,
                f"must be a multiple of TP * PP * CP = {tp} * {pp} * {cp} = {tp * pp * cp}; "
                "change the number of ranks, or " + ", ".join(_key(name) for name, size in sizes.items() if size > 1),
            )
        expert_ranks = self.expert_tensor_parallel_size * self.expert_model_parallel_size
        if self.stage_size % expert_ranks:
            raise ConfigError.of(
                "parallel.expert_model_parallel_size",
                self.expert_model_parallel_size,
                "multiplied by "
                f"parallel.expert_tensor_parallel_size={self.expert_tensor_parallel_size}, must divide "
                f"{self.stage_size}, the number of ranks of a pipeline stage (TP * CP * DP); change one of the two "
                "keys, or the number of ranks (launch.num_nodes, launch.ranks_per_node)",
            )

    @property
    def stage_size(self) -> int:
        """Return the number of ranks of one pipeline stage."""
        return self.world_size // self.pipeline_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Return the data-parallel size, which is the number of ranks that read different samples."""
        return self.stage_size // (self.tensor_model_parallel_size * self.context_parallel_size)

    @property
    def expert_data_parallel_size(self) -> int:
        """Return the expert data-parallel size, which is the number of ranks that have equal experts."""
        return self.stage_size // (self.expert_tensor_parallel_size * self.expert_model_parallel_size)

    def coordinates(self, rank: int) -> _Coordinates:
        """Return the position of a global rank in each parallel group."""
        assert 0 <= rank < self.world_size, f"rank {rank} is not below the world size {self.world_size}"
        # The order is that of ``parallel_state.initialize_model_parallel``; another order would misplace shards.
        stage, inside = divmod(rank, self.stage_size)
        outer, tp = divmod(inside, self.tensor_model_parallel_size)
        dp, cp = divmod(outer, self.context_parallel_size)
        # Expert layers divide the same ranks into expert TP, EP and expert DP, instead of TP, CP and DP.
        expert_dp, ep = divmod(inside // self.expert_tensor_parallel_size, self.expert_model_parallel_size)
        return _Coordinates(tp=tp, cp=cp, dp=dp, pp=stage, ep=ep, expert_dp=expert_dp)

    @property
    def model_parts(self) -> tuple[int, ...]:
        """Return a number for each rank: stage * TP + tensor-parallel coordinate. Ranks with equal numbers have the
        same part of the model, i.e. equal non-expert weights."""
        places = (self.coordinates(rank) for rank in range(self.world_size))
        return tuple(place.pp * self.tensor_model_parallel_size + place.tp for place in places)

    def describe_part(self, part: int) -> str:
        """Describe a part of the model, given by its number, e.g. ``pipeline stage 1, tensor part 0``."""
        stage, tensor = divmod(part, self.tensor_model_parallel_size)
        return f"pipeline stage {stage}, tensor part {tensor}"

    def ranks(self) -> Iterator[tuple[int, _Coordinates]]:
        """Yield every rank with its coordinates, in rank order."""
        return ((rank, self.coordinates(rank)) for rank in range(self.world_size))

    def stage_ranks(self, pipeline_stage: int) -> range:
        """Return the global ranks of a pipeline stage."""
        return range(pipeline_stage * self.stage_size, (pipeline_stage + 1) * self.stage_size)

    def expert_parallel_ranks(self, ranks: Iterable[int]) -> list[list[int]]:
        """Group ``ranks`` by expert-parallel coordinate. The ranks of a group have the same range of experts."""
        found: list[list[int]] = [[] for _ in range(self.expert_model_parallel_size)]
        for rank in ranks:
            found[self.coordinates(rank).ep].append(rank)
        return found

    def chunk_layers(self, num_layers: int, pipeline_stage: int, chunk: int = 0) -> range:
        """Return the layer numbers, counted from 1, of one virtual pipeline chunk of a stage."""
        num_chunks = self.pipeline_model_parallel_size * self.virtual_pipeline_model_parallel_size
        layers_per_chunk = num_layers // num_chunks
        # Interleaved: chunk 0 of all stages comes before chunk 1 of the first stage.
        first = (chunk * self.pipeline_model_parallel_size + pipeline_stage) * layers_per_chunk + 1
        return range(first, first + layers_per_chunk)

    def stage_layers(self, num_layers: int, pipeline_stage: int) -> tuple[int, ...]:
        """Return the layer numbers, counted from 1, of all virtual pipeline chunks of a stage, in ascending order."""
        chunks = range(self.virtual_pipeline_model_parallel_size)
        return tuple(layer for chunk in chunks for layer in self.chunk_layers(num_layers, pipeline_stage, chunk))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of a job: the node of each rank, the failure domain of each node, and which nodes are alive."""

    nodes: tuple[int, ...]
    """Number of the node on which each rank runs, by rank."""
    failure_domains: tuple[str, ...]
    alive: frozenset[int]

    @classmethod
    def of(cls, num_nodes: int, ranks_per_node: int, failure_domains: list[str] | None = None) -> "Cluster":
        """Make a cluster whose nodes are all alive. Without ``failure_domains``, each node is a domain of its own."""
        domains = tuple(failure_domains or (f"node{node}" for node in range(num_nodes)))
        assert len(domains) == num_nodes, f"failure_domains={domains}: must have {num_nodes} entries, one per node"
        nodes = tuple(node for node in range(num_nodes) for _ in range(ranks_per_node))
        return cls(nodes=nodes, failure_domains=domains, alive=frozenset(range(num_nodes)))

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes, alive or not."""
        return len(self.failure_domains)

    def node_of(self, rank: int) -> int:
        """Return the node of a global rank."""
        return self.nodes[rank]

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the global ranks of a node."""
        return tuple(rank for rank, found in enumerate(self.nodes) if found == node)

    def without(self, node: int) -> "Cluster":
        """Return this cluster with ``node`` marked as lost."""
        return replace(self, alive=self.alive - {node})


def _key(name: str) -> str:
    return "launch.num_nodes * launch.ranks_per_node" if name == "world_size" else f"parallel.{name}"
