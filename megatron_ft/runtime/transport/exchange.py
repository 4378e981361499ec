"""Exchanges tensors between all ranks of a group, as bytes, with one uneven all-to-all.

Collectives support few dtypes: gloo, for example, does not support float8. Every dtype can be sent as ``uint8``.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def exchange_tensors(
    outgoing: Sequence[Sequence[torch.Tensor]],
    incoming: Sequence[Sequence[torch.Tensor]],
    group: dist.ProcessGroup,
) -> int:
    """Send ``outgoing[r]`` to each rank r of ``group`` and fill ``incoming[r]`` with the tensors from r, in order.

    All ranks of the group must call this. A sender and its receiver must list the same tensors: same order, shapes and
    dtypes.

    Returns:
        Number of bytes that this rank sent.
    """
    device = _device(group)
    sent = _joined([_bytes(tensor) for of_rank in outgoing for tensor in of_rank], device)
    send_sizes = [sum(_num_bytes(tensor) for tensor in of_rank) for of_rank in outgoing]
    receive_sizes = [sum(_num_bytes(tensor) for tensor in of_rank) for of_rank in incoming]
    received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
    # Sender and receiver know all sizes, so sizes are not exchanged. Ranks without tensors must take part, too.
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    targets = [tensor for of_rank in incoming for tensor in of_rank]
    for target, part in zip(targets, received.split([_num_bytes(tensor) for tensor in targets]), strict=True):
        # Cloned, because a view needs an address that is aligned for its dtype, and a part may begin anywhere.
        target.copy_(part.clone().view(target.dtype).view(target.shape))
    return len(sent)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _joined(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat([part.to(device) for part in parts]) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _device(group: dist.ProcessGroup) -> torch.device:
    # The backend of the group decides, not the tensors: a rank without tensors takes part, too.
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
