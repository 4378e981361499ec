"""AdamW updates of copies of optimizer state. They give the same bits as the update in the rank that owns the state.

``StateCopies`` repeats updates on copies of whole shards, in the memory of ranks. A snapshot server repeats updates on
copies of experts in windows, if ranks send gradients instead of state (MoEtion, section 5.2).
"""

from collections.abc import Mapping, Sequence

import torch
from torch.optim.adam import adam

from megatron_ft.snapshot.window import Slice, Update


@torch.no_grad()
def repeat_adamw(
    copies: Sequence[Mapping[str, torch.Tensor]],
    gradients: Sequence[torch.Tensor],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Apply an update of ``torch.optim.AdamW`` to copies of FP32 state, in place, bitwise equal to the owner's update.

    The update is element by element, so the copies may be any ranges of the tensors that the owner updates.

    Args:
        copies: tensors ``master``, ``exp_avg``, ``exp_avg_sq`` and ``step`` (number of updates, 0-dim) of each range.
        gradients: unscaled and clipped gradients of the ranges, FP32, in the shapes of ``master``.
    """
    # ``AdamW.step`` calls this function. An ``AdamW`` object would keep its tensors until a garbage collection, but the
    # memory of copies must be free as soon as it is not used any more.
    adam(
        [copy["master"] for copy in copies],
        list(gradients),
        [copy["exp_avg"] for copy in copies],
        [copy["exp_avg_sq"] for copy in copies],
        [],
        [copy["step"] for copy in copies],
        decoupled_weight_decay=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def repeat_update(
    update: Update, part: Slice, before: memoryview, payload: memoryview, gradients: Sequence[bytearray]
) -> None:
    """Compute the pieces of slice ``part`` that ``update`` changes, and write them to ``payload``.

    Args:
        before: bytes of the slice of the preceding iteration, which has the same pieces as ``part``.
        payload: memory for the bytes of ``part``. The other pieces in it are not changed.
        gradients: FP32 gradients, in the order of ``update.gradients``.
    """
    torch.set_num_threads(1)  # the ranks of this node need the other cores
    for gradient, pieces, content in zip(update.gradients, update.pieces(part), gradients, strict=True):
        copy = {}
        for component, index in pieces.items():
            piece = part.pieces[index]
            payload[piece.offset : piece.end] = before[piece.offset : piece.end]
            copy[component] = torch.frombuffer(payload[piece.offset : piece.end], dtype=torch.float32)
        copy["step"] = copy["step"].view(())
        repeat_adamw(
            [copy],
            [torch.frombuffer(content, dtype=torch.float32)],
            lr=gradient.learning_rate,
            weight_decay=gradient.weight_decay,
            betas=update.betas,
            eps=update.eps,
        )
