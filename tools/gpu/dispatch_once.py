"""Dispatches a few tokens to experts with every kernel, for compute-sanitizer, and compares results with the reference.

python -m tools.gpu.dispatch_once cuda
"""

import sys
from collections.abc import Sequence

import torch

from megatron_ft.runtime.dispatch.backend import open_backend
from megatron_ft.testing.routing import make_routing, plan_all

HIDDEN = 40


def main(arguments: Sequence[str]) -> int:
    """Run a dispatch with the named backend. Return 0 if all its bits equal those of the reference."""
    name = arguments[0]
    return 0 if dispatch(name, "cuda" if name == "cuda" else "cpu") else 1


def dispatch(name: str, device: str) -> bool:
    """Dispatch tokens with a backend and combine them. Return whether their order and sums equal the reference's."""
    routing = make_routing(num_ranks=4, topk=3, num_experts=16, tokens=(50, 1, 0, 33), skew=1.0, seed=5)
    backend, reference = open_backend(name), open_backend("reference")
    generator = torch.Generator().manual_seed(1)
    same = True
    for mine, other in zip(plan_all(backend, routing.to(device)), plan_all(reference, routing), strict=True):
        tokens = torch.randn(mine.num_tokens, HIDDEN, generator=generator)
        probs = torch.rand(mine.num_tokens, 16, generator=generator)
        leaf, scale = tokens.to(device).requires_grad_(), probs.to(device).requires_grad_()
        total = backend.unpermute(backend.permute(leaf, mine), scale, mine)
        total.sum().backward()
        wanted = reference.unpermute(reference.permute(tokens, other), probs, other)
        same &= torch.equal(mine.permutation.cpu(), other.permutation)
        same &= torch.equal(total.detach().cpu(), wanted)
    return same


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
