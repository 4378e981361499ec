"""Exchanges the commit vote between all ranks of the job."""

import torch
import torch.distributed as dist

from megatron_ft import failpoints
from megatron_ft.planning.commit import BALLOT_FIELDS, Ballot


def exchange(ballot: Ballot, group: dist.ProcessGroup) -> list[Ballot]:
    """All-gather the ballots of all ranks of ``group``, and return them in rank order. Each ballot is float64
    [BALLOT_FIELDS]. It is not an all-reduce, because the caller compares the values of the ranks bit for bit, and sums
    them in a fixed order."""
    mine = torch.tensor(ballot.to_row(), dtype=torch.float64)
    rows = torch.empty((group.size(), BALLOT_FIELDS), dtype=torch.float64)
    # Asynchronous, so that the failpoint can kill this rank while other ranks are inside the collective.
    work = dist.all_gather_into_tensor(rows.view(-1), mine, group=group, async_op=True)
    failpoints.hit("vote_inside", ballot.iteration)
    work.wait()
    return [Ballot.from_row(row) for row in rows.tolist()]
