"""Claim ``gpu-dispatch``: schedule, plan, rows and sums of a dispatch take at most twice the time of copying the same
bytes.

The copy contains only the bytes of the rows. It reads and writes each of them once, on the same device.
"""

import statistics
import sys
from collections.abc import Sequence

from benchmarks.gpu_engine import device_type
from benchmarks.report import finish, parse_arguments

ID = "gpu-dispatch"
MAX_RATIO = 2.0
TOKENS, SHORT_TOKENS = 16384, 64
HIDDEN, SHORT_HIDDEN = 4096, 32
NUM_RANKS, TOPK, NUM_EXPERTS = 8, 6, 64
ROUNDS = 15


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    import torch

    from megatron_ft.runtime.dispatch.backend import open_backend
    from megatron_ft.testing.routing import make_routing
    from tools.gpu.timing import seconds_of

    device = torch.device(device_type())
    num_tokens, hidden = (SHORT_TOKENS, SHORT_HIDDEN) if arguments.quick else (TOKENS, HIDDEN)
    backend = open_backend("cuda" if device.type == "cuda" else "reference")
    routing = make_routing(
        num_ranks=NUM_RANKS, topk=TOPK, num_experts=NUM_EXPERTS, tokens=(num_tokens,), skew=0.7, seed=3
    ).to(device)
    counts, local = routing.counts, routing.local_experts(0)
    tokens = torch.randn(num_tokens, hidden, device=device).to(torch.bfloat16)
    probs = torch.rand(num_tokens, NUM_EXPERTS, device=device)

    def dispatch() -> torch.Tensor:
        handle = backend.plan(routing.maps[0], backend.schedule(counts, routing.replicas, 0), 0, local)
        return backend.unpermute(backend.permute(tokens, handle), probs, handle)

    handle = backend.plan(routing.maps[0], backend.schedule(counts, routing.replicas, 0), 0, local)
    num_rows = backend.permute(tokens, handle).shape[0]
    num_bytes = (3 * num_rows + num_tokens) * hidden * tokens.element_size()
    source = torch.ones(max(1, num_bytes // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    pairs = []
    for _ in range(3 if arguments.quick else ROUNDS):
        copied = seconds_of(lambda: target.copy_(source), device, repeats=3)
        pairs.append((seconds_of(dispatch, device, repeats=3), copied))
    ratio = statistics.median(spent / copied for spent, copied in pairs)
    return finish(
        arguments.out,
        ID,
        passed=ratio <= MAX_RATIO,
        figure=f"{ratio:.2f}x, {statistics.median(spent for spent, _ in pairs) * 1e3:.2f} ms for {num_rows} rows",
        threshold=f"<= {MAX_RATIO:g}x the time to copy as many bytes",
        counts={"rounds": len(pairs), "tokens": num_tokens, "rows": num_rows},
        details={"pairs": pairs, "bytes": num_bytes, "hidden": hidden},
    )


if __name__ == "__main__":
    sys.exit(main())
