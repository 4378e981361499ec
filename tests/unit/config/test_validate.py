"""Tests every rule of the configuration with one row: a violation, and the key in its message."""

from typing import Any

import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.config.validate import validate
from megatron_ft.errors import ConfigError

NAN = float("nan")


def job(changes: dict[str, Any]) -> JobConfig:
    """Return the default configuration with dotted keys changed."""
    values: dict[str, Any] = {}
    for key, value in changes.items():
        *groups, name = key.split(".")
        target = values
        for group in groups:
            target = target.setdefault(group, {})
        target[name] = value
    return from_dict(values)


def ranks(number: int) -> dict[str, Any]:
    return {"launch.ranks_per_node": number}


NAMED = {"run.name": "first", "run.resume": "auto"}
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({**ranks(3), "parallel.tensor_model_parallel_size": 2}, "launch.num_nodes"),
    ({**ranks(2), "parallel.expert_model_parallel_size": 4}, "parallel.expert_model_parallel_size"),
    ({**ranks(3), "parallel.expert_model_parallel_size": 3}, "parallel.expert_model_parallel_size"),
    ({**ranks(3), "parallel.pipeline_model_parallel_size": 3}, "model.num_layers"),
    ({"parallel.virtual_pipeline_model_parallel_size": 2}, "parallel.virtual_pipeline_model_parallel_size"),
    ({**ranks(2), "parallel.context_parallel_size": 2, "training.device": "cpu"}, "parallel.context_parallel_size"),
    ({"parallel.overlap_param_gather": True}, "parallel.overlap_param_gather"),
    ({"parallel.device_backend": "mpi"}, "parallel.device_backend"),
    ({"parallel.device_backend": "nccl", "training.device": "cpu"}, "parallel.device_backend"),
    (
        {
            **ranks(2),
            "parallel.device_backend": "gloo",
            "parallel.context_parallel_size": 2,
            "training.device": "cuda",
        },
        "parallel.context_parallel_size",
    ),
    (
        {
            **ranks(2),
            "parallel.device_backend": "gloo",
            "parallel.expert_tensor_parallel_size": 2,
            "training.device": "cuda",
        },
        "parallel.expert_tensor_parallel_size",
    ),
    ({"launch.ranks_per_gpu": 0}, "launch.ranks_per_gpu"),
    (
        {**ranks(2), "parallel.tensor_model_parallel_size": 2, "model.num_query_groups": 1},
        "model.num_query_groups",
    ),
    ({**ranks(2), "parallel.tensor_model_parallel_size": 2, "model.seq_length": 33}, "model.seq_length"),
    (
        {**ranks(2), "parallel.tensor_model_parallel_size": 2, "model.make_vocab_size_divisible_by": 1},
        "model.make_vocab_size_divisible_by",
    ),
    (
        {
            **ranks(2),
            "parallel.tensor_model_parallel_size": 2,
            "parallel.expert_tensor_parallel_size": 2,
            "training.device": "cpu",
        },
        "parallel.expert_tensor_parallel_size",
    ),
    ({"model.num_attention_heads": 3}, "model.num_attention_heads"),
    ({"model.num_query_groups": 3}, "model.num_query_groups"),
    ({"model.max_position_embeddings": 64}, "model.seq_length"),
    ({"model.position_embedding_type": "alibi"}, "model.position_embedding_type"),
    ({"model.hidden_dropout": 1.0}, "model.hidden_dropout"),
    ({"model.rotary_percent": 0.0}, "model.rotary_percent"),
    ({"model.rope_type": "yarn"}, "model.rope_type"),
    ({"model.multi_latent_attention": True, "model.rope_type": "linear"}, "model.rope_type"),
    ({"model.multi_latent_attention": True, "model.mscale": 0.7}, "model.mscale"),
    (
        {"model.multi_latent_attention": True, "model.rope_type": "yarn", "model.rotary_scaling_factor": 0.0},
        "model.rotary_scaling_factor",
    ),
    ({"model.add_bias_linear": True, "training.transformer_impl": "local"}, "model.add_bias_linear"),
    ({"model.add_bias_linear": True, "training.device": "cpu"}, "model.add_bias_linear"),
    ({"model.num_layers": 0}, "model.num_layers"),
    ({"model.moe_router_topk": 9}, "model.moe_router_topk"),
    ({"model.moe_router_topk": 1}, "model.moe_router_pre_softmax"),
    ({"model.moe_router_load_balancing_type": "sinkhorn"}, "model.moe_aux_loss_coeff"),
    ({"model.moe_router_load_balancing_type": "aux"}, "model.moe_router_load_balancing_type"),
    ({"model.moe_router_enable_expert_bias": True}, "model.moe_router_enable_expert_bias"),
    ({"model.moe_pad_expert_input_to_capacity": True}, "model.moe_pad_expert_input_to_capacity"),
    ({"model.moe_router_num_groups": 4}, "model.moe_router_num_groups"),
    ({"model.moe_router_num_groups": 3, "model.moe_router_group_topk": 1}, "model.moe_router_num_groups"),
    ({"model.moe_layer_freq": 5}, "model.moe_layer_freq"),
    ({"model.num_moe_experts": None}, "model.moe_ffn_hidden_size"),
    ({"model.moe_shared_expert_gate": True}, "model.moe_shared_expert_gate"),
    (
        {"model.moe_shared_expert_intermediate_size": 64, "model.add_bias_linear": True},
        "model.add_bias_linear",
    ),
    ({"training.global_batch_size": 15}, "training.global_batch_size"),
    ({"training.train_iterations": 0}, "training.train_iterations"),
    ({"training.evaluate_only": True}, "training.evaluate_only"),
    ({"training.frozen": "router"}, "training.frozen"),
    (
        {"training.frozen": "experts", "model.num_moe_experts": None, "model.moe_ffn_hidden_size": None},
        "training.frozen",
    ),
    (
        {
            "training.frozen": "others",
            "model.moe_router_enable_expert_bias": True,
            "model.moe_router_score_function": "sigmoid",
        },
        "model.moe_router_enable_expert_bias",
    ),
    (
        {"training.evaluate_only": True, "checkpoint.load": "a", "snapshot.policy": {"_target_": "a.B"}},
        "snapshot.policy",
    ),
    ({"training.loss_spike_factor": 1.0}, "training.loss_spike_factor"),
    ({"training.device": "tpu"}, "training.device"),
    ({"optimizer.lr": 0.0}, "optimizer.lr"),
    ({"optimizer.lr": NAN}, "optimizer.lr"),
    ({"optimizer.min_lr": 1.0}, "optimizer.min_lr"),
    ({"optimizer.adam_beta1": 1.0}, "optimizer.adam_beta1"),
    ({"optimizer.lr_warmup_iterations": 60}, "optimizer.lr_warmup_iterations"),
    ({"optimizer.lr_decay_style": "WSD"}, "optimizer.lr_wsd_decay_iterations"),
    ({"precision.fp8": "e5m2"}, "precision.fp8"),
    ({"precision.regime": "fp8_fp8"}, "precision.regime"),
    ({"precision.regime": "fp16_fp16_fp16_fp16"}, "precision.params_dtype"),
    ({"precision.regime": "fp8_fp32_fp32_fp32", "precision.params_dtype": "bf16"}, "precision.fp8"),
    (
        {"precision.regime": "fp16_fp16_fp16_fp16", "precision.params_dtype": "fp16", "precision.fp8": "hybrid"},
        "precision.fp8",
    ),
    (
        {
            "precision.regime": "fp16_fp16_fp16_fp16",
            "precision.params_dtype": "fp16",
            "snapshot.policy": {"_target_": "megatron_ft.planning.snapshot.partial_experts.PartialExperts"},
            "snapshot.num_peer_copies": 0,
        },
        "precision.regime",
    ),
    ({"precision.fp8_amax_history_length": 0}, "precision.fp8_amax_history_length"),
    ({"optimizer.update_backend": "triton"}, "optimizer.update_backend"),
    ({"optimizer.update_backend": "cpp"}, "optimizer.update_backend"),
    (
        {
            "precision.regime": "fp16_fp16_fp16_fp16",
            "precision.params_dtype": "fp16",
            "optimizer.update_backend": "cuda",
            "training.device": "cpu",
        },
        "optimizer.update_backend",
    ),
    ({"precision.fp8": "hybrid", "precision.fp8_recipe": "mxfp8"}, "precision.fp8_recipe"),
    ({"precision.fp8": "e4m3", "precision.params_dtype": "fp16"}, "precision.params_dtype"),
    (
        {**ranks(2), "precision.fp8": "e4m3", "parallel.tensor_model_parallel_size": 2},
        "parallel.tensor_model_parallel_size",
    ),
    (
        {**ranks(2), "precision.fp8": "e4m3", "parallel.expert_tensor_parallel_size": 2},
        "parallel.expert_tensor_parallel_size",
    ),
    (
        {**ranks(2), "precision.fp8": "e4m3", "parallel.context_parallel_size": 2, "training.device": "cuda"},
        "parallel.context_parallel_size",
    ),
    (
        {"precision.fp8": "e4m3", "training.device": "cuda", "training.transformer_impl": "transformer_engine"},
        "training.transformer_impl",
    ),
    ({"precision.params_dtype": "int8"}, "precision.params_dtype"),
    ({"precision.loss_scale": 2.0}, "precision.loss_scale"),
    ({"launch.num_nodes": 0}, "launch.num_nodes"),
    ({"control.interface": "0.0.0.0"}, "control.interface"),
    ({"control.interface": "::"}, "control.interface"),
    ({"launch.master_port": 70000}, "launch.master_port"),
    ({"testing.failpoints": ["explode()"]}, "testing.failpoints"),
    ({"testing.failpoints": ['kill(rank=7, at_iteration=1, phase="forward")']}, "testing.failpoints"),
    ({"testing.failpoints": ['kill(at_iteration=100000, phase="forward")']}, "testing.failpoints"),
    ({"testing.failpoints": ['kill(at_iteration=-1, phase="forward")']}, "testing.failpoints"),
    ({"testing.failpoints": ['kill(generation=1, phase="forward")']}, "testing.failpoints"),
    ({"testing.failpoints": ['kill(generation=-1, phase="forward")']}, "testing.failpoints"),
    ({"recovery.max_restarts": -1}, "recovery.max_restarts"),
    ({"recovery.max_restarts": 1, "launch.mode": "torchrun"}, "recovery.max_restarts"),
    ({"launch.node_launcher": "ssh"}, "launch.node_launcher"),
    ({"launch.node_launcher": "srun", "launch.mode": "srun"}, "launch.mode"),
    ({"launch.node_launcher": "srun", "launch.forkserver_socket": "warm.sock"}, "launch.forkserver_socket"),
    ({**NAMED, "launch.node_launcher": "none", "launch.mode": "torchrun"}, "launch.mode"),
    ({**NAMED, "launch.node_launcher": "none", "launch.forkserver_socket": "warm.sock"}, "launch.forkserver_socket"),
    ({"launch.node_launcher": "none", "run.resume": "auto"}, "run.name"),
    ({"launch.node_launcher": "none", "run.name": "first"}, "run.resume"),
    ({"topology.failure_domains": ["a", "b"]}, "topology.failure_domains"),
    ({"topology.failure_domain_source": "slurm"}, "topology.failure_domain_source"),
    ({"topology.failure_domain_source": "slurm_topology"}, "topology.failure_domain_source"),
    (
        {
            "topology.failure_domain_source": "slurm_topology",
            "launch.node_launcher": "srun",
            "topology.failure_domains": ["a"],
        },
        "topology.failure_domains",
    ),
    ({"run.name": "../up"}, "run.name"),
    ({"run.resume": "must"}, "run.name"),
    ({"run.start_over": True}, "run.start_over"),
    ({"run.start_over": True, "run.resume": "must", "run.name": "first"}, "run.start_over"),
    ({"data.train": []}, "data.train"),
    ({"data.train_weights": [1.0, 2.0]}, "data.train_weights"),
    ({"data.train_weights": [-1.0]}, "data.train_weights"),
    ({"data.tokenizer": "gpt2"}, "data.vocab_file"),
    ({"data.vocab_file": "x"}, "data.vocab_file"),
    ({"telemetry.wandb": "maybe"}, "telemetry.wandb"),
    ({"telemetry.alert_single_loss_survival": 1.1}, "telemetry.alert_single_loss_survival"),
    ({"telemetry.alert_free_disk_share": 0.0}, "telemetry.alert_free_disk_share"),
    ({"telemetry.alert_stall_share": 0.0}, "telemetry.alert_stall_share"),
    ({"telemetry.alert_windows_behind": 1.0}, "telemetry.alert_windows_behind"),
    ({"telemetry.alert_slowest_rank_over_median": 1.0}, "telemetry.alert_slowest_rank_over_median"),
    ({"checkpoint.keep_last": -1}, "checkpoint.keep_last"),
    ({"dry_run_format": "xml"}, "dry_run_format"),
]


@pytest.mark.parametrize(("changes", "key"), BROKEN, ids=[str(number) for number in range(len(BROKEN))])
def test_broken_configurations_are_refused_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(job(changes))
    message = str(caught.value)
    assert message.startswith(key), message
    assert "\n" not in message and "must" in message


WORKING: list[dict[str, Any]] = [
    {},
    {**ranks(3), "training.global_batch_size": 16},
    {**ranks(2), "parallel.tensor_model_parallel_size": 2, "parallel.expert_model_parallel_size": 2},
    {**ranks(2), "parallel.pipeline_model_parallel_size": 2, "parallel.virtual_pipeline_model_parallel_size": 2},
    {**ranks(4), "parallel.pipeline_model_parallel_size": 2, "parallel.expert_model_parallel_size": 2},
    {"model.num_moe_experts": None, "model.moe_ffn_hidden_size": None},
    {"model.moe_router_load_balancing_type": "sinkhorn", "model.moe_aux_loss_coeff": 0.0},
    {"model.moe_router_num_groups": 4, "model.moe_router_group_topk": 2},
    {"model.multi_latent_attention": True, "training.device": "cpu"},
    {"model.multi_latent_attention": True, "model.rope_type": "yarn", "model.rotary_scaling_factor": 8.0},
    {"testing.failpoints": ['kill(rank=0, at_iteration=1, phase="forward")']},
    {"testing.failpoints": ['kill(generation=1, phase="forward")'], "recovery.max_restarts": 1},
    {"optimizer.lr_decay_style": "WSD", "optimizer.lr_wsd_decay_iterations": 10},
]


@pytest.mark.parametrize("changes", WORKING, ids=[str(number) for number in range(len(WORKING))])
def test_working_configurations_pass(changes: dict[str, Any]) -> None:
    validate(job(changes))
