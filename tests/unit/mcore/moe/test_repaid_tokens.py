"""Tests that experts that lost tokens in a recovery process more of them, within the capacity of all experts."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity

from megatron_ft.errors import ConfigError
from megatron_ft.mcore.moe.router import more_tokens
from megatron_ft.planning.snapshot.lost_tokens import TokenLedger
from megatron_ft.testing import engines

LIMITED = {"model.moe_expert_capacity_factor": 1.0, "model.moe_aux_loss_coeff": 0.0}
PARTIAL = {
    "_target_": "megatron_ft.planning.snapshot.partial_experts.PartialExperts",
    "num_experts": 1,
    "max_lost_share": None,
}
REPAYING = {**LIMITED, "snapshot.repay_capacity_share": 0.5, "snapshot.policy": PARTIAL}
REPAYING["snapshot.num_peer_copies"] = 0


def expected(
    probs: torch.Tensor, routed: torch.Tensor, kept: torch.Tensor, owing: list[int], capacity: int, most: int
) -> set[tuple[int, int]]:
    """Return the additional (token, expert) pairs, chosen one after the other."""
    unused = capacity * routed.shape[1] - int(kept.sum())
    found = set()
    for expert in owing:
        dropped = [token for token in range(len(probs)) if routed[token, expert] and not kept[token, expert]]
        dropped.sort(key=lambda token: -float(probs[token, expert]))
        for token in dropped[:most]:
            if unused:
                unused -= 1
                found.add((token, expert))
    return found


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("seed", range(20))
def test_additional_tokens_are_those_that_a_search_finds(seed: int, policy: str) -> None:
    generator, drawn = torch.Generator().manual_seed(seed), random.Random(seed)
    num_tokens, num_experts, topk = 64, 8, 2
    logits = torch.randn(num_tokens, num_experts, generator=generator) + torch.linspace(2, 0, num_experts)
    chosen = logits.topk(topk).indices
    routed = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, chosen, True)
    probs = logits.softmax(dim=1) * routed
    factor = drawn.choice([0.5, 1.0, 1.5])
    capacity = get_capacity(num_tokens * topk, num_experts, factor)
    _, kept = apply_router_token_dropping(probs, routed, topk, factor, policy)
    owing = drawn.sample(range(num_experts), drawn.randint(1, num_experts))
    most = drawn.randint(1, capacity)
    by_probs = policy == "probs"
    added, extra = more_tokens(probs, routed, kept, torch.tensor(owing), capacity, most, by_probs=by_probs)
    scores = probs if by_probs else -torch.arange(num_tokens).unsqueeze(1).expand_as(probs)
    wanted = expected(scores, routed, kept, owing, capacity, most)
    assert {tuple(pair) for pair in added.nonzero().tolist()} == wanted
    assert extra.tolist() == [sum(expert == other for _, other in wanted) for expert in range(num_experts)]
    assert not (added & kept).any() and not (added & ~routed).any()
    assert int((kept | added).sum()) <= capacity * num_experts


def run(overrides: dict[str, Any], owed: list[int] | None = None) -> dict[str, Any]:
    """Train three iterations. ``owed`` are the tokens that each expert of the first layer has lost before."""
    with engines.engine_of(engines.micro_config(overrides)) as engine:
        if owed is not None:
            none = [0] * len(owed)
            engine.history = engine.history.after_loss([owed, none])
        votes, kept, ledgers = [], [], []
        for iteration in (1, 2, 3):
            votes.append(replace(engine.run_iteration(iteration).vote, generation=0))
            kept.append(engine.expert_load())
            ledgers.append(engine.history.tokens)
        return {"votes": votes, "kept": kept, "state": engines.digests(engine), "ledgers": ledgers}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, "full"])
def test_only_experts_that_lost_tokens_process_more_until_they_have_made_up_for_them(recompute: str | None) -> None:
    """Without lost tokens, the key changes no bit."""
    keys = {**REPAYING, "training.recompute_granularity": recompute}
    without = run({**LIMITED, "training.recompute_granularity": recompute})
    unchanged = run(keys)
    assert unchanged["votes"] == without["votes"] and unchanged["state"] == without["state"]
    busiest = int(without["kept"][0][0].argmax())
    owed = [3 if expert == busiest else 0 for expert in range(len(without["kept"][0][0]))]
    repaying = run(keys, owed)
    first, *later = repaying["ledgers"]
    assert first.repaid[0][busiest] >= 3, "as many as were lost, in one iteration"
    more = repaying["kept"][0][0] - without["kept"][0][0]
    assert more.tolist() == list(first.repaid[0]) == [first.repaid[0][busiest] if tokens else 0 for tokens in owed]
    assert not any(first.repaid[1]) and not any(map(any, first.owed()))
    assert repaying["votes"][0] != without["votes"][0]
    assert all(ledger.repaid == first.repaid for ledger in later), "nothing is owed any more"


def test_the_ledger_counts_what_is_owed_and_is_read_without_repaid_tokens() -> None:
    ledger = TokenLedger.empty([[0, 0, 0]]).after([[5, 5, 5]]).after_loss([[4, 0, 2]])
    assert ledger.owed() == ((4, 0, 2),)
    ledger = ledger.after([[6, 5, 5]], [[1, 0, 3]])
    assert ledger.owed() == ((3, 0, 0),) and ledger.processed == ((11, 10, 10),)
    written = {"processed": [[1, 2]], "lost": [[0, 1]]}
    assert TokenLedger.from_json(written).repaid == ((0, 0),)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model.moe_expert_capacity_factor": None}, "model.moe_expert_capacity_factor=null"),
        ({"model.moe_pad_expert_input_to_capacity": True}, "model.moe_pad_expert_input_to_capacity=true"),
        ({"snapshot.policy": None}, "unless snapshots leave out experts"),
        ({"snapshot.repay_capacity_share": 0.0}, "above 0 and at most 1"),
    ],
)
def test_what_has_no_capacity_or_loses_no_tokens_is_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="snapshot.repay_capacity_share") as caught:
        engines.micro_config({**REPAYING, **overrides})
    assert words in str(caught.value)
