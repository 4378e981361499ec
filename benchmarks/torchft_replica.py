"""Runs one replica of a plain torchft job for ``kill_to_commit``, in a separate environment that contains torchft.

    python torchft_replica.py LIGHTHOUSE_ADDRESS NUMBER MIN_REPLICAS TIMEOUT_SECONDS

A small transformer is trained with torchft's ``Manager`` over ``ProcessGroupGloo``. ``PureDistributedDataParallel``
averages gradients over replicas, because torchft's ``DistributedDataParallel`` ends survivors of a fault inside an
all-reduce with torch 2.13. The script prints a line of JSON for every committed step, and ends when stdin closes.
"""

import json
import os
import sys
import threading
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.ddp import PureDistributedDataParallel
from torchft.optim import OptimizerWrapper

HIDDEN, NUM_LAYERS, VOCABULARY, SEQUENCE, BATCH = 64, 4, 320, 16, 4


class Model(torch.nn.Module):
    """Embedding, encoder layers and head. Its size is about that of the dense part of ``model=moe_micro`` plus the
    parameters of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        layers = [
            torch.nn.TransformerEncoderLayer(HIDDEN, 4, 8 * HIDDEN, dropout=0.0, batch_first=True)
            for _ in range(NUM_LAYERS)
        ]
        self.layers = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, sequence, vocabulary]."""
        return self.head(self.layers(self.embedding(tokens)))


def main() -> None:
    """Train until standard input closes."""
    lighthouse, number, min_replicas, timeout_seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = Model()
    inner = torch.optim.AdamW(model.parameters())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=float(timeout_seconds))
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=min_replicas,
        timeout=limit,
        quorum_timeout=timedelta(seconds=60),
        replica_id=f"replica-{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    replicated = PureDistributedDataParallel(manager, model)
    optimizer = OptimizerWrapper(manager, inner)
    generator = torch.Generator().manual_seed(number)
    while True:
        step = manager.current_step()
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        optimizer.zero_grad()
        logits = replicated(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        if manager.current_step() > step:
            report = {"step": manager.current_step(), "replicas": manager.num_participants(), "time": time.time()}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
