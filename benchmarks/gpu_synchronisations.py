"""Claim ``gpu-synchronisations``: in the forward and backward pass, the host waits for the GPU once per layer and
microbatch.

PyTorch reports each operation that waits (``torch.cuda.set_sync_debug_mode``). The only allowed one reads the numbers
of tokens that the experts receive. Without a GPU, calls of operations that would wait are counted.
"""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu_engine import device_type, open_engine
from benchmarks.report import finish, parse_arguments

ID = "gpu-synchronisations"
MAX_PER_LAYER = 1.0
WARM_UP = 2
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select")


def main(argv: Sequence[str] | None = None) -> int:
    """Count the operations and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    engine = open_engine({}, quick=arguments.quick)
    for iteration in range(1, WARM_UP + 1):
        engine.run_iteration(iteration)
    with _counted() as found:
        engine.accumulate(WARM_UP + 1)
    passes = engine.config.model.num_layers * engine.batch.num_microbatches
    each = sum(found.values()) / passes
    return finish(
        arguments.out,
        ID,
        passed=each <= MAX_PER_LAYER,
        figure=f"{each:.2f} for each layer and microbatch",
        threshold=f"<= {MAX_PER_LAYER:g} for each layer and microbatch",
        counts={"synchronisations": sum(found.values()), "layers_times_microbatches": passes},
        details={"places": found},
    )


@contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Count the operations in the block that wait for the device, by the place of the call or by the operation's
    name."""
    with _by_driver() if device_type() == "cuda" else _by_name() as found:
        yield found


@contextmanager
def _by_driver() -> Iterator[dict[str, int]]:
    import torch

    found: dict[str, int] = {}
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in raised:
        if "synchronizing CUDA operation" in str(warning.message):
            place = f"{warning.filename.rpartition('/')[2]}:{warning.lineno}"
            found[place] = found.get(place, 0) + 1


@contextmanager
def _by_name() -> Iterator[dict[str, int]]:
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = operation.__name__.partition(".")[0]
            if name in _WAITING:
                found[name] = found.get(name, 0) + 1
            return operation(*args, **(kwargs or {}))

    with Count():
        yield found


if __name__ == "__main__":
    sys.exit(main())
