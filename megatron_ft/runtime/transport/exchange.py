"""One uneven exchange of tensors between all ranks of a group, as bytes.

Collectives support few dtypes (gloo has no float8); ``uint8`` views represent all of them unchanged.
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

    Both sides must use the same order, shapes and dtypes. Collective over the group.

    Returns:
        Bytes that this rank sent.
    """
    device = _device(group)
    sent = _joined([_bytes(tensor) for of_rank in outgoing for tensor in of_rank], device)
    send_sizes = [sum(_num_bytes(tensor) for tensor in of_rank) for of_rank in outgoing]
    receive_sizes = [sum(_num_bytes(tensor) for tensor in of_rank) for of_rank in incoming]
    received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
    # Both ends know all sizes, so none are exchanged. Ranks that send and receive nothing take part, too.
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    targets = [tensor for of_rank in incoming for tensor in of_rank]
    for target, part in zip(targets, received.split([_num_bytes(tensor) for tensor in targets]), strict=True):
        # A part may begin at an address that its dtype cannot be viewed at: a clone is aligned.
        target.copy_(part.clone().view(target.dtype).view(target.shape))
    return len(sent)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _joined(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat([part.to(device) for part in parts]) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _device(group: dist.ProcessGroup) -> torch.device:
    # Choose the device that the group's backend needs: a rank without tensors takes part too.
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
