"""Arguments of Megatron-LM in ``common.pt``: converts a model to arguments, and arguments to a model."""

import argparse
from pathlib import Path
from typing import Any

from megatron_ft.config.checks.model import valid_model
from megatron_ft.config.megatron_lm import keys_of_pattern
from megatron_ft.config.model import YARN_KEYS, ModelConfig
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.mcore.checkpoint.metadata import COMMON_NAME, read_common
from megatron_ft.mcore.model.transformer_config import DTYPES, moe_layer_pattern
from megatron_ft.snapshot.storage.manifest import Manifest

_TOKENIZERS = {
    "gpt2": "GPT2BPETokenizer",
    "huggingface": "HuggingFaceTokenizer",
    "sentencepiece": "GPTSentencePieceTokenizer",
}


def megatron_arguments(model: ModelConfig, manifest: Manifest, *, weights_only: bool) -> argparse.Namespace:
    """Return Megatron-LM's arguments for ``model`` and the job that saved the checkpoint. Megatron-LM compares some
    arguments with its command line. With ``--use-checkpoint-args``, it takes the others from the checkpoint.

    Args:
        weights_only: whether the checkpoint has no optimizer state.
    """
    topology, settings = manifest.topology, {k: v for each in manifest.settings.values() for k, v in each.items()}
    dtype, heads = settings.get("precision.params_dtype", "fp32"), model.num_attention_heads
    tp, pp, cp = (topology.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context"))
    world_size, mixtures = topology.get("world_size", 1), moe_layer_pattern(model)
    found: dict[str, Any] = {
        # Values that Megatron-LM reads when it continues.
        "iteration": manifest.iteration,
        "consumed_train_samples": manifest.consumed_samples,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
        "global_batch_size": settings.get("training.global_batch_size"),
        # The layout in which the checkpoint was saved.
        "world_size": world_size,
        "data_parallel_size": world_size // (tp * pp * cp),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": topology.get("expert_model_parallel_size", 1),
        "expert_tensor_parallel_size": topology.get("expert_tensor_parallel_size", 1),
        "virtual_pipeline_model_parallel_size": topology.get("virtual_pipeline_model_parallel_size") or None,
        # The format of the checkpoint. States of random generators are not stored as in Megatron-LM.
        "ckpt_format": "torch_dist",
        "dist_ckpt_optim_fully_reshardable": True,
        "use_distributed_optimizer": settings.get("parallel.use_distributed_optimizer", True),
        "no_save_optim": True if weights_only else None,
        "no_save_rng": True,
        "data_parallel_random_init": False,
        "tokenizer_type": _TOKENIZERS.get(settings.get("data.tokenizer", ""), "NullTokenizer"),
        # The model.
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": heads,
        "group_query_attention": model.num_query_groups is not None,
        "num_query_groups": model.num_query_groups or heads,
        "kv_channels": model.kv_channels or model.hidden_size // heads,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.max_position_embeddings or model.seq_length,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "position_embedding_type": model.position_embedding_type,
        "add_position_embedding": True,
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "normalization": model.normalization,
        "norm_epsilon": model.layernorm_epsilon,
        "layernorm_epsilon": model.layernorm_epsilon,
        "swiglu": model.gated_linear_unit and model.activation == "silu",
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "num_experts": model.num_moe_experts,
        "moe_layer_freq": 1 if all(mixtures) else mixtures,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.ffn_hidden_size,
        "multi_latent_attention": model.multi_latent_attention,
        "params_dtype": DTYPES[dtype],
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
    }
    own = (*found, "moe_first_dense_layers")
    found |= {name: getattr(model, name) for name in vars(model) if name.startswith("moe_") and name not in own}
    if model.multi_latent_attention:
        latent = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        found |= {name: getattr(model, name) for name in latent}
        found |= {name: value for name in YARN_KEYS if (value := getattr(model, name)) is not None}
        found["rope_type"] = model.rope_type or "rope"
    return argparse.Namespace(**found)


def has_gated_units(directory: Path) -> bool:
    """Return whether the MLPs of a checkpoint of Megatron-LM are gated. Return False if ``common.pt`` has no arguments.
    Raise CheckpointError if ``common.pt`` cannot be read."""
    return bool(getattr(read_common(directory).get("args"), "swiglu", False))


def model_of_arguments(directory: Path) -> ModelConfig:
    """Return the model that the arguments in a checkpoint of Megatron-LM describe. Keys that change neither the shapes
    of weights nor outputs keep their default values.

    Raises:
        CheckpointError: the checkpoint has no arguments, an argument is missing, or the model is not supported.
    """
    given, where = read_common(directory).get("args"), directory / COMMON_NAME
    if not isinstance(given, argparse.Namespace):
        raise CheckpointError(f"{where}: has no arguments of Megatron-LM, so the model is not known")
    values = vars(given)
    try:
        if refused := [name for name in _REFUSED if values.get(name)]:
            raise CheckpointError(f"{where}: {refused[0]}={values[refused[0]]!r:.80}: not supported by this project")
        return valid_model(_keys_of(values))
    except KeyError as error:
        raise CheckpointError(f"{where}: its arguments lack {error.args[0]}, so the model is not known") from None
    except (ConfigError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: its arguments describe a model that this project does not support: {error}"
        ) from None


_SAME = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "position_embedding_type",
    "normalization",
)
_SAME += ("untie_embeddings_and_output_weights", "add_bias_linear")
"""Arguments that every version of Megatron-LM stores, and that have the same names as keys of ``model``."""
_LATER = ("kv_channels", "seq_length", "make_vocab_size_divisible_by", "rotary_percent", "add_qkv_bias", "qk_layernorm")
_LATER += ("hidden_dropout", "attention_dropout", "init_method_std")
_MOE = ("moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate")
_MOE += ("moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk")
_MOE += ("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", *YARN_KEYS)
_REFUSED = (
    "squared_relu",
    "quick_geglu",
    "rotary_interleaved",
    "use_rope_scaling",
    "apply_layernorm_1p",
    "window_size",
)
_REFUSED += ("mtp_num_layers", "heterogeneous_layers_config_path", "experimental_attention_variant")
"""Arguments that, if they are set, describe models that this project does not support."""
_MOST_LAYERS = 100_000


def _keys_of(given: dict[str, Any]) -> dict[str, Any]:
    """Convert Megatron-LM's arguments to keys of ``model``. Raise KeyError with the name of a missing argument."""
    keys = {name: given[name] for name in _SAME}
    keys |= {name: given[name] for name in _LATER if given.get(name) is not None}
    keys["vocab_size"] = given["padded_vocab_size"]
    keys["num_query_groups"] = given["num_query_groups"] if given["group_query_attention"] else None
    keys["gated_linear_unit"] = bool(given["swiglu"])
    keys["activation"] = "silu" if given["swiglu"] else "gelu"
    epsilon = "norm_epsilon" if "norm_epsilon" in given else "layernorm_epsilon"
    keys["layernorm_epsilon"] = float(given[epsilon])
    if given["position_embedding_type"] == "rope":
        keys["rotary_base"] = int(given["rotary_base"])
    else:
        keys["max_position_embeddings"] = given["max_position_embeddings"]
    keys["num_moe_experts"] = given["num_experts"]
    if given["num_experts"] is not None:
        keys["moe_router_topk"] = given["moe_router_topk"]
        keys |= {name: given[name] for name in _MOE if name in given}
        keys["moe_layer_freq"], keys["moe_first_dense_layers"] = _layers(given)
    else:
        keys["moe_ffn_hidden_size"] = None
    if given.get("multi_latent_attention"):
        keys |= {name: given[name] for name in _LATENT if name in given}
        is_extended = given["rope_type"] == "yarn"
        keys |= {"multi_latent_attention": True, "rope_type": "yarn" if is_extended else None}
        keys |= {} if is_extended else dict.fromkeys(YARN_KEYS)
    return keys


def _layers(given: dict[str, Any]) -> tuple[int, int]:
    pattern, num_layers = given.get("moe_layer_freq", 1), given["num_layers"]
    if isinstance(pattern, int):  # with a number, Megatron-LM's first layer has experts
        # Both values come from a file. A damaged file must not fill the memory with a list.
        if pattern < 1:
            raise ValueError(f"moe_layer_freq={pattern}: must be at least 1")
        if not isinstance(num_layers, int) or not 0 < num_layers <= _MOST_LAYERS:
            raise ValueError(f"num_layers={num_layers!r:.80}: must be an integer from 1 to {_MOST_LAYERS}")
        pattern = [int(layer % pattern == 0) for layer in range(num_layers)]
    if (found := keys_of_pattern(pattern)) is None:
        raise ValueError(
            f"moe_layer_freq={pattern!r:.200}: must be 1 for every n-th layer of the model and 0 for all others; the "
            "first layers may all be 0"
        )
    return found
