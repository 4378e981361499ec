"""Exchanges the commit vote over the whole job."""

import torch
import torch.distributed as dist

from megatron_ft import failpoints
from megatron_ft.planning.commit import BALLOT_FIELDS, Ballot


def exchange(ballot: Ballot, group: dist.ProcessGroup) -> list[Ballot]:
    """Send this rank's ballot and return every rank's in rank order, after all have contributed.

    One all-gather of float64 [BALLOT_FIELDS] over ``group``: unlike a sum it keeps each rank's values, so agreement is
    checked to the bit and sums are taken in a fixed order.
    """
    mine = torch.tensor(ballot.to_row(), dtype=torch.float64)
    rows = torch.empty((group.size(), BALLOT_FIELDS), dtype=torch.float64)
    # Asynchronous, so that the failpoint can end a rank while others are inside the collective.
    work = dist.all_gather_into_tensor(rows.view(-1), mine, group=group, async_op=True)
    failpoints.hit("vote_inside", ballot.iteration)
    work.wait()
    return [Ballot.from_row(row) for row in rows.tolist()]
