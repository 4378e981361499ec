"""Exports a dense checkpoint as a folder of checkpoints in the layout of Megatron-LM."""

import argparse
import errno
import io
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint.files import COMMON_NAME
from megatron_ft.mcore.checkpoint.metadata import describe
from megatron_ft.mcore.convert.dense_files import WEIGHTS_ONLY, DenseReader
from megatron_ft.mcore.convert.folder import check_space
from megatron_ft.mcore.convert.weights import check_new, manifest_of, open_weights
from megatron_ft.mcore.model.transformer_config import DTYPES, moe_layer_pattern
from megatron_ft.snapshot.storage.checkpoints import MEGATRON_LATEST_NAME, RELEASE_NAME, directory_name
from megatron_ft.snapshot.storage.files import fsync_directory, write_atomically, write_file
from megatron_ft.snapshot.storage.manifest import Manifest

_WEIGHTS_METADATA = {"singleton_local_shards": True, "non_homogeneous_layers": True}
"""Description of the tensors of a checkpoint of weights, which does not contain one."""

_TOKENIZERS = {
    "gpt2": "GPT2BPETokenizer",
    "huggingface": "HuggingFaceTokenizer",
    "sentencepiece": "GPTSentencePieceTokenizer",
}


def export_to_megatron(checkpoint: Path, out: Path, *, progress: Callable[[str], None] = print) -> Path:
    """Write the folder ``out``, from which Megatron-LM loads ``checkpoint`` with ``--load``.

    The data files are links to the files of ``checkpoint``, or copies if ``out`` is on another file system. Megatron-LM
    expects its arguments in ``common.pt``, so this file also contains ``args``. A checkpoint that contains only weights
    is exported as a *release*, which belongs to no iteration. The exported checkpoint has a manifest, and is verified
    at the end. ``out`` has its name only when it is complete.

    Args:
        progress: receives a line that states whether the files were linked or copied.

    Returns:
        The exported checkpoint, a directory in ``out``.

    Raises:
        CheckpointError: the checkpoint is damaged, its manifest does not describe the model, or the files do not
            contain what was written.
        ConfigError: ``out`` exists, or the disk has too little space.
        OSError: a file cannot be written.
    """
    check_new(out)
    reader = open_weights(checkpoint)
    model, manifest = reader.model(), manifest_of(reader)
    is_release = WEIGHTS_ONLY in manifest.settings
    name = RELEASE_NAME if is_release else directory_name(manifest.iteration)
    common = {"content_metadata": _WEIGHTS_METADATA, **_read_common(checkpoint)}
    common["args"] = megatron_arguments(model, manifest)
    if "opt_param_scheduler" in common:
        # Earlier versions of this project stored the position at the beginning of the iteration.
        common["opt_param_scheduler"]["num_steps"] = manifest.consumed_samples
    partial = out.parent / f".{out.name}.{os.getpid()}.partial"
    target = partial / name
    target.mkdir(parents=True)
    try:
        how = _link_files(checkpoint, target, manifest)
        content = io.BytesIO()
        torch.save(common, content)
        entries = [entry for entry in manifest.files if entry.name != COMMON_NAME]
        entries.append(write_file(target, COMMON_NAME, content.getvalue()))
        fsync_directory(target)
        replace(manifest, files=tuple(sorted(entries, key=lambda entry: entry.name))).write(target)
        tracker = RELEASE_NAME if is_release else str(manifest.iteration)
        write_atomically(partial, MEGATRON_LATEST_NAME, tracker.encode())
        _verify(target, common)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    fsync_directory(out.parent)
    progress(f"{len(entries)} files, of which {len(entries) - 1} are {how}")
    return out / name


def _read_common(directory: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about unusual pickles before it refuses them
            # As Megatron-LM reads it: only classes that Megatron has registered as safe are loaded.
            found = dist_checkpointing.load_common_state_dict(str(directory))
    except Exception as error:  # torch may raise any exception for invalid content
        raise CheckpointError(f"{directory / COMMON_NAME}: cannot be read: {describe(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{directory / COMMON_NAME}: must be a dictionary, not {type(found).__name__}")
    return found


def _link_files(checkpoint: Path, target: Path, manifest: Manifest) -> str:
    """Link or copy the files of ``checkpoint`` except ``common.pt``. Return how it was done."""
    names = [entry.name for entry in manifest.files if entry.name != COMMON_NAME]
    try:
        for name in names:
            # The data files of a checkpoint never change, so both directories may have the same ones.
            os.link(checkpoint / name, target / name, follow_symlinks=False)
        return "links"
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
    check_space(target, sum(entry.num_bytes for entry in manifest.files))
    for name in names:
        (target / name).unlink(missing_ok=True)
        shutil.copyfile(checkpoint / name, target / name)
        with (target / name).open("rb") as file:
            os.fsync(file.fileno())
    return "copies"


def _verify(target: Path, common: dict[str, Any]) -> None:
    DenseReader.open(target)
    stored = _read_common(target)
    if stored.get("args") != common["args"] or stored.keys() != common.keys():
        raise CheckpointError(f"{target / COMMON_NAME}: does not contain what was written")


def megatron_arguments(model: ModelConfig, manifest: Manifest) -> argparse.Namespace:
    """Return the arguments of Megatron-LM that describe ``model`` and the job that saved the checkpoint, by
    Megatron-LM's names. Megatron-LM compares some of them with its command line, and uses the others with
    ``--use-checkpoint-args``."""
    topology, settings = manifest.topology, {k: v for each in manifest.settings.values() for k, v in each.items()}
    dtype, heads = settings.get("precision.params_dtype", "fp32"), model.num_attention_heads
    tp, pp, cp = (topology.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context"))
    world_size, mixtures = topology.get("world_size", 1), moe_layer_pattern(model)
    found: dict[str, Any] = {
        # What Megatron-LM reads when it continues.
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
        # The format of the checkpoint. The states of generators are not those of Megatron-LM.
        "ckpt_format": "torch_dist",
        "dist_ckpt_optim_fully_reshardable": True,
        "use_distributed_optimizer": settings.get("parallel.use_distributed_optimizer", True),
        "no_save_optim": True if WEIGHTS_ONLY in manifest.settings else None,
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
    return argparse.Namespace(**found)
