"""Random number generators of one rank, as plain tensors and numbers."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def seed_rng(seed: int, pg_collection: ProcessGroupCollection) -> None:
    """Seed torch's and Megatron's generators by this rank's coordinates, as at the start of a run."""
    pg = pg_collection
    torch.manual_seed(seed + 100 * pg.pp.rank() + 10 * pg.dp.rank())
    model_parallel_cuda_manual_seed(
        seed + 100 * pg.pp.rank(),
        force_reset_rng=True,
        tp_rank=pg.tp.rank(),
        ep_rank=pg.ep.rank(),
        etp_rank=pg.expt_tp.rank(),
    )


def capture_rng() -> dict[str, Any]:
    """Capture the state of Python's, numpy's, torch's (CPU, and CUDA where there is one) and Megatron's generators.

    Tensors are copies: later draws do not change them.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state().clone(),
        "tracker": {name: value.clone() for name, value in _tracker().get_states().items()},
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().clone()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the result of :func:`capture_rng`."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    _tracker().set_states({name: value.clone() for name, value in state["tracker"].items()})


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()
