"""Claim ``gpu-copy-bandwidth``: a slice of a window is copied off the GPU nearly as fast as one large copy to pinned
memory.

The slice has as many pieces as a slice of a real job, with the sizes of weights, moments and norms. The copy of the
slice and the large copy alternate.
"""

import statistics
import sys
from collections.abc import Sequence

from benchmarks.gpu_engine import device_type
from benchmarks.report import finish, parse_arguments

ID = "gpu-copy-bandwidth"
MIN_SHARE = 0.85
NUM_PIECES, PIECE_BYTES = 600, 3 << 20
SHORT_PIECES, SHORT_PIECE_BYTES = 20, 1 << 14
ROUNDS = 15


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    import torch

    from megatron_ft.snapshot.capture import capture
    from tools.gpu.timing import seconds_of

    device = torch.device(device_type())
    count, size = (SHORT_PIECES, SHORT_PIECE_BYTES) if arguments.quick else (NUM_PIECES, PIECE_BYTES)
    sizes = [size if number % 3 else size // 512 for number in range(count)]
    sources = [torch.ones(each, dtype=torch.uint8, device=device) for each in sizes]
    whole = torch.ones(sum(sizes), dtype=torch.uint8, device=device)
    memory = torch.zeros(sum(sizes), dtype=torch.uint8)
    if device.type == "cuda":
        capture.pin(memory)
    batch = capture.CopyBatch.of(sources, list(memory.split(sizes)))
    opened = capture.open_copier(device)

    def capture() -> None:
        opened.start(batch)
        opened.wait()

    shares, rates = [], []
    for _ in range(3 if arguments.quick else ROUNDS):
        ceiling = seconds_of(lambda: memory.copy_(whole, non_blocking=True), device, repeats=1)
        memory.zero_()
        spent = seconds_of(capture, device, repeats=1)
        shares.append(ceiling / spent)
        rates.append(sum(sizes) / spent)
    complete = bool((memory == 1).all())
    opened.close()
    if device.type == "cuda":
        capture.unpin(memory)
    share = statistics.median(shares)
    return finish(
        arguments.out,
        ID,
        passed=share >= MIN_SHARE and complete,
        figure=f"{share:.2f} of one copy's rate, {statistics.median(rates) / 1e9:.1f} GB/s",
        threshold=f">= {MIN_SHARE:g} of the rate of one copy into pinned memory",
        counts={"rounds": len(shares), "pieces": count, "bytes": sum(sizes)},
        details={"shares": shares, "bytes_per_second": rates, "every_byte_arrived": complete},
    )


if __name__ == "__main__":
    sys.exit(main())
