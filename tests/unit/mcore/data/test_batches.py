"""Tests the content of microbatches. ``test_fake_gpu.py`` tests how they are copied to a GPU."""

import torch

from megatron_ft.mcore.data.batches import BatchReader
from megatron_ft.planning.iteration import BatchPlan
from megatron_ft.testing.engines import MadeUpSamples

SEQ_LENGTH = 8


def reader(
    *, data_parallel_size: int = 1, context_parallel_rank: int = 0, context_parallel_size: int = 1
) -> BatchReader:
    plan = BatchPlan(
        global_batch_size=6, micro_batch_size=2, data_parallel_size=data_parallel_size, num_microbatches_multiple=1
    )
    return BatchReader(
        samples=MadeUpSamples(SEQ_LENGTH),
        plan=plan,
        seq_length=SEQ_LENGTH,
        data_parallel_rank=data_parallel_size - 1,
        needs_tokens=True,
        device=torch.device("cpu"),
        context_parallel_rank=context_parallel_rank,
        context_parallel_size=context_parallel_size,
    )


def test_labels_are_the_tokens_that_follow() -> None:
    samples = MadeUpSamples(SEQ_LENGTH)
    read = list(reader().microbatches(1))
    assert [batch.is_padding for batch in read] == [False] * 3
    for number, batch in enumerate(read):
        for row in range(2):
            sample = torch.from_numpy(samples.sample(2 * number + row))
            assert torch.equal(batch.tokens[row], sample[:-1])  # type: ignore[index]
            assert torch.equal(batch.labels[row], sample[1:])  # type: ignore[index]
            assert torch.equal(batch.position_ids[row], torch.arange(SEQ_LENGTH))  # type: ignore[index]


def test_padding_is_zeros_and_says_so() -> None:
    *_, last = reader(data_parallel_size=2).microbatches(1)
    assert last.is_padding
    assert not last.tokens.any() and not last.labels.any()  # type: ignore[union-attr]


def test_ranks_of_a_sequence_share_it_as_megatron_does() -> None:
    whole = next(reader().microbatches(1))
    parts = [next(reader(context_parallel_rank=r, context_parallel_size=2).microbatches(1)) for r in range(2)]
    for name in ("tokens", "labels", "position_ids"):
        chunks = getattr(whole, name).chunk(4, dim=1)
        for rank, part in enumerate(parts):
            assert torch.equal(getattr(part, name), torch.cat([chunks[rank], chunks[3 - rank]], dim=1))
