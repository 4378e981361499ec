"""Tests loss, positions and attention of documents in samples, against Megatron's masks and document by document."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megatron_ft.config.job import JobConfig
from megatron_ft.config.remembered import changes, check_allowed
from megatron_ft.config.validate import validate
from megatron_ft.corpus.indexed import IndexedWriter
from megatron_ft.errors import ConfigError
from megatron_ft.mcore.data.batches import (
    BatchReader,
    DocumentRules,
    attention_mask,
    forward_step,
    open_samples,
    sum_of_losses,
)
from megatron_ft.planning.iteration import BatchPlan
from megatron_ft.testing import engines

EOD = 0
KEYS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
LEARNED = {"model.position_embedding_type": "learned_absolute"}
ALL = LEARNED | {f"data.{key}": True for key in KEYS}


def rules(masks_loss: bool = True, resets_positions: bool = True, resets_attention: bool = True) -> DocumentRules:
    return DocumentRules(
        eod=EOD, masks_loss=masks_loss, resets_positions=resets_positions, resets_attention=resets_attention
    )


class Documents(engines.MadeUpSamples):
    """Random samples in which about every fifth token ends a document."""

    eod = EOD

    def sample(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(0, 5, size=self.seq_length + 1).astype(np.int64)


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 4, 0, 5, 6, 7, 0, 8],
        [0, 0, 0, 1, 0, 0, 2, 3],
        [1, 2, 3, 4, 5, 6, 7, 0],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0] * 8,
    ],
)
@pytest.mark.parametrize("flags", itertools.product([False, True], repeat=3))
def test_masks_are_those_of_megatron(tokens: list[int], flags: tuple[bool, bool, bool]) -> None:
    masks_loss, resets_positions, resets_attention = flags
    row = torch.tensor(tokens)
    attention, loss, positions = _get_ltor_masks_and_position_ids(
        row, EOD, resets_positions, resets_attention, masks_loss, True
    )
    mine = rules(*flags)
    assert torch.equal(mine.counted(row[None])[0].float(), loss)
    assert torch.equal(mine.positions(row[None])[0], positions)
    documents = mine.documents(row[None])
    assert torch.equal(attention_mask(documents if resets_attention else torch.zeros_like(documents))[0], attention)


def reader(data_parallel_rank: int = 0, *, needs_tokens: bool = True, context_parallel_rank: int = 0, **cp: Any) -> Any:
    plan = BatchPlan(global_batch_size=6, micro_batch_size=2, data_parallel_size=2)
    return BatchReader(
        samples=Documents(8),
        plan=plan,
        seq_length=8,
        data_parallel_rank=data_parallel_rank,
        needs_tokens=needs_tokens,
        device=torch.device("cpu"),
        context_parallel_rank=context_parallel_rank,
        rules=rules(),
        **cp,
    )


def test_stages_without_tokens_get_the_documents_and_no_rank_counts_padding() -> None:
    whole, inner = list(reader().microbatches(1)), list(reader(needs_tokens=False).microbatches(1))
    assert all(batch.tokens is batch.counted is None for batch in inner)
    assert [batch.is_padding for batch in inner] == [batch.is_padding for batch in whole]
    assert all(torch.equal(a.documents, b.documents) for a, b in zip(whole, inner, strict=True))
    counted = [
        int(batch.counted.sum()) for rank in (0, 1) for batch in reader(rank).microbatches(1) if not batch.is_padding
    ]
    assert sum(counted) == sum(reader(rank).num_loss_tokens(1) for rank in (0, 1))
    expected = sum(int((Documents(8).sample(index)[:-1] != EOD).sum()) for index in range(6))
    assert sum(counted) == expected < 48
    parts = [reader(context_parallel_rank=part, context_parallel_size=2).num_loss_tokens(1) for part in (0, 1)]
    assert sum(parts) == reader().num_loss_tokens(1)
    *_, padding = reader(1).microbatches(1)
    assert padding.is_padding and sum_of_losses(True, padding.counted, torch.ones(2, 8))[1] == 0


def test_losses_that_do_not_count_may_be_infinite() -> None:
    losses = torch.tensor([[1.0, float("inf"), 3.0]])
    total, num_tokens, report = sum_of_losses(False, torch.tensor([[1, 0, 1]]), losses)
    assert total == 4.0 and num_tokens == 2 and report.tolist() == [4.0, 2.0] and num_tokens.dtype == torch.int32


@pytest.mark.parametrize("extra", [{}, {"model.num_query_groups": 2, "training.recompute_granularity": "full"}])
def test_a_packed_sample_is_its_documents_one_by_one(extra: dict[str, Any]) -> None:
    """The reference runs the model on each document alone, and sums only losses that count."""
    config = engines.micro_config(ALL | extra)
    with engines.engine_of(config) as engine:
        engine.samples = {"train": Documents(config.model.seq_length)}
        (model,) = engine.model_chunks
        microbatches = list(engine.reader("train", 1).microbatches(1))
        with torch.no_grad():
            for batch in microbatches:
                output, loss_of = forward_step(iter([batch]), model, iteration=1)
                total, num_tokens, _ = loss_of(output)
                expected, count = 0.0, 0
                for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
                    ends = [-1, *(tokens == EOD).nonzero().flatten().tolist(), len(tokens) - 1]
                    for first, last in itertools.pairwise(ends):
                        part = slice(first + 1, last + 1)
                        if tokens[part].numel():
                            positions = torch.arange(tokens[part].numel())
                            alone = model(tokens[None, part], positions[None], None, labels=labels[None, part])[0]
                            expected += float(alone[tokens[part] != EOD].sum())
                            count += int((tokens[part] != EOD).sum())
                assert int(num_tokens) == count
                assert float(total) == pytest.approx(expected, rel=1e-5)
    assert any((batch.tokens[:, :-1] == EOD).any() for batch in microbatches), "documents end within samples"


def test_the_vote_counts_the_tokens_of_the_loss() -> None:
    config = engines.micro_config({"data.eod_mask_loss": True})
    with engines.engine_of(config) as engine:
        engine.samples = {"train": Documents(config.model.seq_length), "valid": Documents(config.model.seq_length)}
        vote = engine.run_iteration(1).vote
        assert vote.num_tokens == engine.reader("train", 1).num_loss_tokens(1) < 4 * config.model.seq_length
        assert engine.evaluate()[1] < config.training.eval_iterations * 4 * config.model.seq_length


def test_attention_to_all_earlier_tokens_is_the_same_with_and_without_a_mask() -> None:
    """The explicit mask must not change a bit: a corpus without ends of documents trains as before."""
    losses = []
    for overrides in ({}, {"data.reset_attention_mask": True, "data.eod_mask_loss": True}):
        with engines.engine_of(engines.micro_config(overrides)) as engine:
            engine.samples["train"].eod = 10**6  # type: ignore[attr-defined]
            losses.append([engine.run_iteration(number).vote.loss for number in (1, 2, 3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data.reset_position_ids": True}, "data.reset_position_ids=true: must be false with rotary positions"),
        (
            {"data.reset_attention_mask": True, "training.device": "cuda", "parallel.context_parallel_size": 2,
             "launch.ranks_per_node": 2},
            "parallel.context_parallel_size=2: must be 1: this value needs Transformer Engine, which "
            "data.reset_attention_mask=true excludes",
        ),
        (
            {"data.reset_attention_mask": True, "training.device": "cuda",
             "training.transformer_impl": "transformer_engine"},
            "training.transformer_impl=transformer_engine: must be local or auto with data.reset_attention_mask=true",
        ),
    ],
)  # fmt: skip
def test_what_attention_cannot_do_is_refused(values: dict[str, Any], message: str) -> None:
    config = JobConfig()
    for key, value in values.items():
        group, name = key.split(".")
        setattr(getattr(config, group), name, value)
    with pytest.raises(ConfigError) as raised:
        validate(config)
    assert message in str(raised.value).replace("True", "true")


def test_the_rules_belong_to_the_identity_of_the_data(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "set", np.dtype("<u2"), overwrite=True) as writer:
        writer.add_document(np.arange(200))
    config = JobConfig()
    config.data.train, config.data.valid_fraction = [str(tmp_path / "set")], 0.0
    plain = open_samples(config, "train")
    assert plain.eod == 256 and plain.plan.document_rules == ()
    found = {plain.fingerprint()}
    for key in KEYS:
        data = dataclasses.replace(config.data, **{key: True})
        changed = dataclasses.replace(config, data=data)
        found.add(open_samples(changed, "train").fingerprint())
        (change,) = changes(config, changed)
        assert change.key == f"data.{key}" and change.concern == "data" and not change.follows
        with pytest.raises(ConfigError, match=rf"run\.allow_change=\[data\.{key}\]"):
            check_allowed([change], [])
    assert len(found) == 4
