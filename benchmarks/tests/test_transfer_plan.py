from benchmarks.transfer_plan import RANKS_PER_NODE, cases, exponent, measure, mixtral
from megatron_ft.config.model import ModelConfig
from megatron_ft.operators import num_parameters, operators_of


def test_the_model_is_mixtral_on_two_tensor_parallel_ranks() -> None:
    """Split tensors have two parts, all others one: together every parameter of the model."""
    config = ModelConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=32000,
        ffn_hidden_size=14336,
        moe_ffn_hidden_size=14336,
        num_moe_experts=8,
    )
    weights = [tensor for tensor in mixtral().index.tensors if tensor.kind == "weight"]
    assert sum(tensor.num_elements for tensor in weights) == num_parameters(operators_of(config))


def test_the_exponent_is_the_slope_between_logarithms() -> None:
    assert exponent([(512, 0.1), (1024, 0.2), (2048, 0.4)]) == 1.0
    assert exponent([(512, 1.0), (1024, 4.0), (2048, 16.0)]) == 2.0


def test_cases_plan_what_they_say() -> None:
    rows = {case.name: measure(case, 128, 1) for case in cases(mixtral(), 128)}
    assert rows["spare node, same layout"]["most_received_bytes"] > rows["spare node, same layout"]["most_sent_bytes"]
    assert rows["dense checkpoint"]["most_sent_bytes"] == 0
    assert all(row["transfers"] > RANKS_PER_NODE for row in rows.values())
