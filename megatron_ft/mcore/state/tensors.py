"""Copies, restores and compares a rank's tensors by global name, and moves the tensors of experts between ranks."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import xxhash
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_ft.mcore.groups import exchange_one, exchange_tensors, wait_for_all
from megatron_ft.mcore.model.transformer_config import named_parameters, unwrap
from megatron_ft.mcore.optimizer.adamw import allocate_state, masters_of, state_tensors, sub_optimizers
from megatron_ft.planning.placement.migration import Replacement, Step, Transfer
from transformer_engine_ext.optimizer import ScaledAdamW


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the xxh3_128 of the tensor's bytes, dtype and shape, as a hexadecimal number."""
    # dtype and shape are included, because zeros of different dtypes have the same bytes.
    digest = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(content.numpy().data)
    return digest.hexdigest()


def named_state(
    model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every parameter, persistent buffer, master weight and moment on this rank. Names are
    ``<parameter>``, ``<parameter>/master``, ``<parameter>/exp_avg`` and so on, where ``<parameter>`` is a global name.
    With the distributed optimizer, masters and moments are flat: the ranges that this rank updates. With
    ``precision.regime``, they are flat quantized values, with scales named ``<parameter>/master_scales`` and so on."""
    names: dict[torch.nn.Parameter, str] = {}
    for number, chunk in enumerate(model_chunks):
        for name, parameter in named_parameters(chunk):
            names[parameter] = name
            yield name, parameter
        parameters = {name for name, _ in unwrap(chunk).named_parameters()}
        for name, tensor in unwrap(chunk).state_dict().items():
            if name not in parameters and torch.is_tensor(tensor):
                yield f"buffer.{number}.{name}", tensor
    for member in sub_optimizers(optimizer):
        for parameter, master in masters_of(member):
            if isinstance(member.optimizer, ScaledAdamW):
                for kind, value in sorted(state_tensors(member, master).items()):
                    yield f"{names[parameter]}/{kind}", value
                continue
            if master is not parameter:
                yield f"{names[parameter]}/master", master
            for kind, value in sorted(member.optimizer.state.get(master, {}).items()):
                if torch.is_tensor(value):
                    yield f"{names[parameter]}/{kind}", value


def state_digest(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> str:
    """Return one digest of all values of :func:`tensor_digests`, whatever the order of the tensors."""
    total = xxhash.xxh3_128()
    for name, digest in sorted(tensor_digests(model_chunks, optimizer).items()):
        total.update(f"{name}={digest}\n".encode())
    return total.hexdigest()


def tensor_digests(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> dict[str, str]:
    """Return the digest of every tensor of :func:`named_state` by name, to find the differences between two states.
    Before the first update, moments are allocated as zeros, so that they are part of the result."""
    allocate_state(optimizer)
    return {name: tensor_digest(tensor) for name, tensor in named_state(model_chunks, optimizer)}


def state_bytes(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> int:
    """Return the bytes of memory of all weights, gradients, master weights and moments of this rank."""
    return sum(storage.nbytes() for storage in _storages(model_chunks, optimizer).values())


def free_state(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Free the memory of all weights, gradients, master weights and moments. Do not use these tensors afterwards."""
    for storage in _storages(model_chunks, optimizer).values():
        storage.resize_(0)


def _storages(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> dict[int, torch.UntypedStorage]:
    tensors = [tensor for _, tensor in named_state(model_chunks, optimizer)]
    for chunk in model_chunks:
        buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)  # type: ignore[misc]
        tensors += [buffer.grad_data for buffer in buffers]
    # Parameters and their shards are views of Megatron's flat buffers.
    return {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}


NamedState = dict[str, torch.Tensor]
"""Tensors by name. The names are those of ``named_state``."""


def take_state(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> NamedState:
    """Return copies of every parameter, buffer, master weight and moment of this rank, by name."""
    return {name: tensor.clone() for name, tensor in held_state(model_chunks, optimizer).items()}


def held_state(model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> NamedState:
    """Return the tensors that ``take_state`` copies, by name. They are valid until model or optimizer train again."""
    return {name: tensor.detach() for name, tensor in distinct_state(model_chunks, optimizer)}


def put_state(
    model_chunks: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    state: Mapping[str, torch.Tensor],
    *,
    has_shards: bool = False,
) -> None:
    """Fill a newly built model and optimizer with ``state``, the result of ``take_state`` or ``held_state``.

    Args:
        has_shards: whether ``state`` lacks the non-expert parameters, because ``optimizer_shards.py`` restores them.
            ``state`` may then also lack weights of experts, which ``optimizer_shards.py`` rounds from master weights.

    Raises:
        KeyError: ``state`` lacks a tensor that this rank needs.
    """
    with torch.no_grad():
        for name, tensor in distinct_state(model_chunks, optimizer):
            # In place, because gradient buffers, hooks and the optimizer reference these tensors.
            is_restored = has_shards and (is_non_expert(name) or (name not in state and f"{name}/master" in state))
            if not is_restored:
                tensor.copy_(state[name])


def distinct_state(
    model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Allocate missing moments. Then yield (name, tensor) like ``named_state``, but without the masters of FP32
    weights, because such a weight is its own master."""
    allocate_state(optimizer)
    own_masters: set[str] = set()
    for name, tensor in named_state(model_chunks, optimizer):
        # ``named_state`` lists weights before their masters.
        if tensor.dtype is torch.float32 and "/" not in name:
            own_masters.add(f"{name}/master")
        if name not in own_masters:
            yield name, tensor


def expert_of(name: str) -> tuple[int, int] | None:
    """Return (layer number from 1, expert) if ``name`` is a tensor of a routed expert, else None."""
    head, found, rest = name.partition(".mlp.experts.local_experts.")
    if not found:
        return None
    layer = int(head.rsplit(".", 1)[1]) + 1
    return layer, int(rest.split(".", 1)[0])


def is_non_expert(name: str) -> bool:
    """Return whether ``name`` is a tensor of a parameter that does not belong to a routed expert."""
    return expert_of(name) is None and not name.startswith("buffer.")


_ExpertId = tuple[int, int]


def move_experts(
    state: NamedState,
    transfers: Iterable[Transfer],
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    *,
    into: NamedState | None = None,
    like: NamedState | None = None,
) -> None:
    """Move experts between ranks as in ``transfers``. All ranks of ``group`` must call this with the same transfers.

    Args:
        state: tensors of this rank, which include the experts that it sends.
        ranks: rank numbers that ``transfers`` uses for the ranks of ``group``, in the order of the group.
        into: dict to which the received tensors are added; None adds them to ``state``.
        like: tensors of any expert, which determine shapes, dtypes and devices; None uses an expert in ``state``.
    """
    position = {rank: place for place, rank in enumerate(ranks)}
    me = ranks[group.rank()]
    names = by_expert(state)
    like = {name: state[name] for name in next(iter(names.values()))} if like is None else like
    target = state if into is None else into
    # An exchange needs buffers for what it sends and receives, so a rank sends and receives at most one expert in each.
    rounds: dict[int, list[Transfer]] = {}
    sent, received = Counter[int](), Counter[int]()
    for transfer in transfers:
        number = max(sent[transfer.source_rank], received[transfer.target_rank])
        sent[transfer.source_rank] = received[transfer.target_rank] = number + 1
        rounds.setdefault(number, []).append(transfer)
    for of_round in (rounds[number] for number in sorted(rounds)):
        outgoing: list[list[torch.Tensor]] = [[] for _ in position]
        incoming: list[list[torch.Tensor]] = [[] for _ in position]
        # Sender and receiver use the order of the plan and sort the names, so names need not be sent.
        for transfer in of_round:
            expert = (transfer.layer_number, transfer.expert)
            if transfer.source_rank == me:
                outgoing[position[transfer.target_rank]] += [state[name] for name in names[expert]]
            if transfer.target_rank == me:
                for name, tensor in _space_for(expert, like).items():
                    target[name] = tensor
                    incoming[position[transfer.source_rank]].append(tensor)
        exchange_tensors(outgoing, incoming, group)


def by_expert(state: Iterable[str]) -> dict[_ExpertId, list[str]]:
    """Return, for each expert (layer number, expert id), the sorted names of its tensors in ``state``."""
    names: dict[_ExpertId, list[str]] = {}
    for name in sorted(state):
        expert = expert_of(name)
        if expert is not None:
            names.setdefault(expert, []).append(name)
    return names


SavedExperts = dict[_ExpertId, list[torch.Tensor]]
"""Copies of the tensors of each expert, in a list in the order of the tensors' names."""


class ExpertPlaces:
    """Replaces experts of this rank by experts of other ranks, inside the tensors of the model and the optimizer.

    A place is the set of tensors of one expert: weights, master weights and moments. Only the contents of these tensors
    change. A replacement needs additional memory for one expert.
    """

    def __init__(self, model_chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
        tensors = dict(distinct_state(model_chunks, optimizer))
        self._places = {expert: [tensors[name] for name in names] for expert, names in by_expert(tensors).items()}
        # Experts have the same tensors in all layers.
        self._aside = [torch.empty_like(t, requires_grad=False) for t in next(iter(self._places.values()), ())]

    def carry_out(
        self,
        steps: Iterable[Step],
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        made: Callable[[Replacement], None],
        saved: SavedExperts | None = None,
    ) -> int:
        """Carry out ``steps``, which replace experts. All ranks of ``group`` must call this.

        Args:
            ranks: rank numbers that ``steps`` uses for the ranks of ``group``, in the order of the group.
            made: called after each replacement of an expert on this rank, to change the expert's id in the model.
            saved: dict to which copies of the experts that this rank drops are added; None makes no copies.

        Returns:
            Number of bytes that this rank received.
        """
        position = {rank: place for place, rank in enumerate(ranks)}
        me, num_received = ranks[group.rank()], 0
        for step in steps:
            leaving = next((r.transfer for r in step if r.transfer.source_rank == me), None)
            coming = next((r for r in step if r.transfer.target_rank == me), None)
            for number, space in enumerate(self._aside):
                sent = received = None
                if leaving is not None:
                    of_expert = self._places[leaving.layer_number, leaving.expert]
                    sent = position[leaving.target_rank], of_expert[number]
                if coming is not None:
                    received = position[coming.transfer.source_rank], space
                exchange_one(sent, received, group)
            # No rank overwrites an expert before all ranks have received their experts. If a rank dies in the exchange,
            # every other rank still has all experts from before the step.
            wait_for_all(group)
            if coming is not None:
                layer = coming.transfer.layer_number
                if saved is not None:
                    saved[layer, coming.dropped] = [t.detach().clone() for t in self._places[layer, coming.dropped]]
                place = self.put(layer, coming.dropped, coming.transfer.expert, self._aside)
                num_received += sum(tensor.numel() * tensor.element_size() for tensor in place)
                made(coming)
        return num_received

    def put(self, layer: int, dropped: int, expert: int, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Overwrite the tensors of expert ``dropped`` in ``layer`` with ``tensors``, the state of ``expert``. Return
        the overwritten tensors."""
        place = self._places[layer, expert] = self._places.pop((layer, dropped))
        _copy(place, tensors)
        return place

    def sort(self, layer: int, experts: Sequence[int]) -> None:
        """Exchange the contents of this rank's expert tensors in ``layer``, so that expert ids are in ascending order.

        Args:
            experts: present id of the expert in each place (set of tensors), in the order of the places.
        """
        order, current = sorted(experts), list(experts)
        places = [self._places[layer, expert] for expert in experts]
        for start in range(len(order)):
            if current[start] == order[start]:
                continue
            # Copy the first expert of a cycle aside, move the others one by one, and then copy the first to its place.
            first, at = current[start], start
            _copy(self._aside, places[start])
            while order[at] != first:
                source = current.index(order[at])
                _copy(places[at], places[source])
                current[at], at = order[at], source
            _copy(places[at], self._aside)
            current[at] = first
        self._places.update({(layer, expert): place for expert, place in zip(order, places, strict=True)})


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def _space_for(expert: _ExpertId, like: NamedState) -> NamedState:
    template = expert_of(next(iter(like)))
    assert template is not None, "``like`` must contain tensors of an expert"
    old, new = _prefix(template), _prefix(expert)
    return {
        name.replace(old, new, 1): torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for name, tensor in like.items()
    }


def _prefix(expert: _ExpertId) -> str:
    return f"decoder.layers.{expert[0] - 1}.mlp.experts.local_experts.{expert[1]}."
