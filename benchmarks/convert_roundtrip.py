"""Claim ``convert-roundtrip``: converted weights keep every bit, and compute the logits of ``transformers``.

Small random models of each family, with the options that the published models use, are saved by ``transformers`` and
converted to checkpoints of this project. Ranks load them in several parallel layouts, and their logits are compared
with those of ``transformers``, in FP32 and relative to the largest logit. The checkpoints are converted back, and all
tensors must have the bits of the first folder. Checkpoints that jobs of several layouts have saved must have the same
bits after a conversion to a folder and back.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from megatron_ft.config.model import ModelConfig
from megatron_ft.testing import engines

ID = "convert-roundtrip"
MOST_DIFFERENCE = 1e-5
THRESHOLD = f"all tensors equal, atol=0; logits within {MOST_DIFFERENCE:g} of the largest logit in FP32"
_LENGTH, _NUM_SEQUENCES = 16, 2
_SMALL = {
    "vocab_size": engines.VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _LENGTH,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
}
_QWEN = {"moe_intermediate_size": 24, "intermediate_size": 48, "num_experts": 4}
_NUM_EXPERTS = 4
_DEEPSEEK = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": _NUM_EXPERTS,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}
_LATENT = {
    **_DEEPSEEK,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_LLAMA = "LlamaConfig"
"""Class of ``deepseek``: ``transformers`` has none, so its Llama gets the MoE layers of DeepSeek-V2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model that ``transformers`` makes."""

    name: str
    config: str
    """Class of the model's configuration in ``transformers``."""
    options: Mapping[str, Any]


CASES = (
    Case(
        name="mixtral",
        config="MixtralConfig",
        options={"intermediate_size": 48, "num_local_experts": _NUM_EXPERTS, "rope_theta": 1_000_000.0},
    ),
    Case(
        name="mixtral, tied, wide heads",
        config="MixtralConfig",
        options={
            "intermediate_size": 48,
            "num_local_experts": _NUM_EXPERTS,
            "head_dim": 16,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
        },
    ),
    Case(
        name="qwen2_moe",
        config="Qwen2MoeConfig",
        options={**_QWEN, "shared_expert_intermediate_size": 40, "norm_topk_prob": False, "num_key_value_heads": 4},
    ),
    Case(
        name="qwen2_moe, normalized, no bias",
        config="Qwen2MoeConfig",
        options={**_QWEN, "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "qkv_bias": False},
    ),
    Case(name="qwen3_moe", config="Qwen3MoeConfig", options={**_QWEN, "head_dim": 16, "norm_topk_prob": True}),
    Case(
        name="qwen3_moe, tied, not normalized",
        config="Qwen3MoeConfig",
        options={**_QWEN, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    Case(name="deepseek", config=_LLAMA, options={**_DEEPSEEK, "num_key_value_heads": 4}),
    Case(
        name="deepseek_v2 like V2-Lite: yarn",
        config="DeepseekV2Config",
        options={**_LATENT, "q_lora_rank": None, "rope_scaling": _YARN, "rope_theta": 10_000.0},
    ),
    Case(
        name="deepseek_v2, low-rank queries, no yarn",
        config="DeepseekV2Config",
        options={**_LATENT, "q_lora_rank": 12, "n_shared_experts": 1, "routed_scaling_factor": 2.0},
    ),
)
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one rank": (1, {}),
    "TP2 EP2": (
        2,
        {"parallel.tensor_model_parallel_size": 2, "parallel.expert_model_parallel_size": 2},
    ),
}
"""Number of ranks and keys of each layout in which logits are computed."""
TRAINED: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "PP2": (2, {"parallel.pipeline_model_parallel_size": 2}),
    "TP2 PP2 EP2, distributed optimizer, bf16": (
        4,
        {
            "parallel.tensor_model_parallel_size": 2,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.expert_model_parallel_size": 2,
            "parallel.use_distributed_optimizer": True,
            "precision.params_dtype": "bf16",
        },
    ),
    "TP2 PP2 EP2, distributed optimizer, latent attention": (
        4,
        {
            "parallel.tensor_model_parallel_size": 2,
            "parallel.pipeline_model_parallel_size": 2,
            "parallel.expert_model_parallel_size": 2,
            "parallel.use_distributed_optimizer": True,
            "model.num_query_groups": None,
            "model.multi_latent_attention": True,
            "model.qk_layernorm": True,
            "model.q_lora_rank": 12,
            "model.kv_lora_rank": 16,
            "model.qk_head_dim": 8,
            "model.qk_pos_emb_head_dim": 4,
            "model.v_head_dim": 10,
        },
    ),
    "DP2 with expert replicas": (
        2,
        {
            "placement.algorithm": {"_target_": "megatron_ft.planning.placement.spread.Spread"},
            "placement.min_replicas": 1,
        },
    ),
}
"""Number of ranks and keys of each layout whose trained state is converted."""


def missing() -> str | None:
    """Return what this machine lacks for the measurement; None if nothing is missing."""
    found = importlib.util.find_spec("transformers")
    return None if found else "transformers is not installed (it needs Python 3.11)"


def main(argv: Sequence[str] | None = None) -> int:
    """Convert all models, and judge the result."""
    arguments = parse_arguments(__doc__, argv)
    cases = CASES[2:3] if arguments.quick else CASES
    layouts = dict(list(LAYOUTS.items())[-1:]) if arguments.quick else LAYOUTS
    trained = dict(list(TRAINED.items())[1:2]) if arguments.quick else TRAINED
    with tempfile.TemporaryDirectory(prefix="convert-") as name:
        folder = Path(name)
        expected = {case.name: _make(case, folder / str(number)) for number, case in enumerate(cases)}
        problems, num_equal = [], 0
        for number, case in enumerate(cases):
            found, equal = _round_trip(folder / str(number), case.name)
            problems, num_equal = problems + found, num_equal + equal
        scenarios = {
            f"{case.name}, {layout}": (
                "benchmarks.convert_roundtrip:logits",
                size,
                {"folder": str(folder / str(number)), "overrides": keys, "tokens": expected[case.name][0]},
            )
            for number, case in enumerate(cases)
            for layout, (size, keys) in layouts.items()
        }
        scenarios |= {
            f"trained, {layout}": (
                "benchmarks.convert_roundtrip:train",
                size,
                {"folder": str(folder / f"trained-{number}"), "overrides": keys},
            )
            for number, (layout, (size, keys)) in enumerate(trained.items())
        }
        outcomes = engines.run_scenarios(scenarios, timeout_seconds=900)
        differences = {}
        for case in cases:
            for layout in layouts:
                name = f"{case.name}, {layout}"
                rows = engines.of_ranks(outcomes, name)[0]
                differences[name] = _difference(rows, expected[case.name][1])
        for number, layout in enumerate(trained):
            engines.of_ranks(outcomes, f"trained, {layout}")
            family = "deepseek_v2" if trained[layout][1].get("model.multi_latent_attention") else "mixtral"
            found, equal = _there_and_back(folder / f"trained-{number}", layout, family)
            problems, num_equal = problems + found, num_equal + equal
    worst = max(differences.values())
    return finish(
        arguments.out,
        ID,
        passed=not problems and worst <= MOST_DIFFERENCE and num_equal > 0,
        figure=f"{num_equal} tensors equal, {len(problems)} differ; logits within {worst:.1e} of transformers",
        threshold=THRESHOLD,
        counts={
            "models": len(cases),
            "forward_passes": len(differences),
            "trained_layouts": len(trained),
            "tensors_equal": num_equal,
            "problems": len(problems),
        },
        details={"differences": differences, "problems": problems},
    )


def _make(case: Case, folder: Path) -> tuple[list[list[int]], Any]:
    """Save a random model in ``folder/theirs``. Return tokens and its logits [sequences, tokens, vocabulary]."""
    import torch
    import transformers

    torch.manual_seed(len(case.name))
    config = getattr(transformers, case.config)(**{**_SMALL, **case.options})
    config.architectures = None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if case.config == _LLAMA:
        _use_experts(model, case.options)
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # with equal values, swapped tensors would go unnoticed
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tokens = torch.randint(0, engines.VOCAB_SIZE, (_NUM_SEQUENCES, _LENGTH))
    with torch.no_grad():
        logits = model(tokens).logits
    if case.config == _LLAMA:
        _save_deepseek(model, case, folder / "theirs")
    else:
        model.save_pretrained(folder / "theirs", max_shard_size="100KB")
    return tokens.tolist(), logits


def _use_experts(model: Any, options: Mapping[str, Any]) -> None:
    """Replace the MLPs of a Llama model by MoE layers of DeepSeek-V2, except in the first layers."""
    import torch
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as deepseek

    config = deepseek.DeepseekV2Config(**{**_SMALL, **options})
    config._experts_implementation = "eager"
    for layer in model.model.layers[options["first_k_dense_replace"] :]:
        layer.mlp = deepseek.DeepseekV2Moe(config)
        with torch.no_grad():
            for parameter in layer.mlp.parameters():
                parameter.normal_(0.0, _SMALL["initializer_range"])


def _save_deepseek(model: Any, case: Case, folder: Path) -> None:
    """Save the model of ``_use_experts`` with the names and the settings of published DeepSeekMoE folders."""
    import json

    from safetensors.torch import save_file

    tensors = {}
    for name, tensor in model.state_dict().items():
        if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            module, kind = name.rsplit(".", 1)
            for expert in range(_NUM_EXPERTS):
                parts = tensor[expert].chunk(2) if kind == "gate_up_proj" else (tensor[expert],)
                names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                for part, part_name in zip(parts, names, strict=True):
                    tensors[f"{module}.{expert}.{part_name}.weight"] = part.clone()
        else:
            tensors[name] = tensor.clone()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    settings = {**_SMALL, **case.options, "model_type": "deepseek", "rope_theta": 10_000.0, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": False}))


def _round_trip(folder: Path, name: str) -> tuple[list[str], int]:
    """Convert ``theirs`` to a checkpoint ``weights`` and back to a folder. Return problems and the number of equal
    tensors."""
    from megatron_ft.mcore.convert.converter import Export, export_checkpoint, family_named, import_folder
    from megatron_ft.mcore.convert.dense_files import DenseReader
    from megatron_ft.mcore.convert.folder import Folder

    before = Folder.open(folder / "theirs")
    import_folder(
        folder / "theirs",
        folder / "weights",
        vocab_multiple=engines.VOCAB_SIZE,
        most_file_bytes=100_000,
        progress=_mute,
    )
    reader = DenseReader.open(folder / "weights")
    export = Export.of(reader, family_named(before.config["model_type"]), most_file_bytes=100_000)
    export_checkpoint(reader, export, folder / "back", progress=_mute)
    after = Folder.open(folder / "back")
    return _compare(name, before, after)


def _there_and_back(folder: Path, name: str, family: str) -> tuple[list[str], int]:
    """Convert a checkpoint, which a job has saved, to a Hugging Face folder and back. Return problems and the number of
    equal tensors."""
    from megatron_ft.mcore.convert.converter import Export, export_checkpoint, family_named, import_folder
    from megatron_ft.mcore.convert.dense_files import DenseReader

    (saved,) = folder.glob("checkpoints/iter_*")
    reader = DenseReader.open(saved)
    export_checkpoint(reader, Export.of(reader, family_named(family)), folder / "theirs", progress=_mute)
    import_folder(folder / "theirs", folder / "weights", vocab_multiple=engines.VOCAB_SIZE, progress=_mute)
    return _compare(name, reader, DenseReader.open(folder / "weights"))


def _compare(name: str, before: Any, after: Any) -> tuple[list[str], int]:
    import torch

    names = [_weights(found) for found in (before, after)]
    problems = [] if names[0] == names[1] else [f"{name}: other tensors: {sorted(names[0] ^ names[1])[:3]}"]
    equal = 0
    for tensor in sorted(names[0] & names[1]):
        one, other = before.read(tensor), after.read(tensor)
        if one.dtype == other.dtype and torch.equal(one, other):
            equal += 1
        else:
            problems.append(f"{name}: {tensor} differs")
    return problems, equal


def _weights(found: Any) -> set[str]:
    return set(found.weights if hasattr(found, "weights") else found.tensors)


def _mute(line: str) -> None:
    return


def _difference(rows: Sequence[Any], expected: Any) -> float:
    import torch

    found = torch.tensor(rows)
    return float((found - expected).abs().max() / expected.abs().max())


def _overrides(model: ModelConfig) -> dict[str, Any]:
    keys = {f"model.{key}": value for key, value in asdict(model).items() if key not in ("vocab_size", "name")}
    return {**keys, "model.make_vocab_size_divisible_by": engines.VOCAB_SIZE}


def logits(
    *, rank: int, world_size: int, store: Any, folder: str, overrides: Mapping[str, Any], tokens: Sequence[Any]
) -> Any:
    """Load the weights in ``folder`` on one rank, and return the logits of ``tokens``, gathered over TP."""
    import torch
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_ft.mcore.convert.dense_files import DenseReader
    from megatron_ft.mcore.model.transformer_config import unwrap

    weights = Path(folder, "weights")
    config = engines.micro_config({**_overrides(DenseReader.open(weights).model()), **overrides}, world_size=world_size)
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine:
        _manager(engine, Path(folder), world_size).load_weights(engine.model_chunks, engine.optimizer, weights)
        model = unwrap(engine.model_chunks[0]).eval()
        with torch.no_grad():
            batch = torch.tensor(tokens)
            positions = torch.arange(batch.shape[1]).expand_as(batch)
            found = model(batch, positions, None)
            return gather_from_tensor_model_parallel_region(found).tolist()


def train(*, rank: int, world_size: int, store: Any, folder: str, overrides: Mapping[str, Any]) -> None:
    """Train two iterations on one rank, and save the state below ``folder``."""
    from megatron_ft.mcore.checkpoint.state import DenseState

    config = engines.micro_config({"model.num_query_groups": 2, **overrides}, world_size=world_size)
    if config.placement.algorithm is not None:
        from megatron_ft.config.membership import derive_placement

        config = derive_placement(config)
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size) as engine:
        for iteration in (1, 2):
            engine.run_iteration(iteration)
        state = DenseState(
            model_chunks=engine.model_chunks,
            optimizer=engine.optimizer,
            scheduler=engine.scheduler,
            host=engine.train_state(),
        )
        manager = _manager(engine, Path(folder), world_size)
        manager.save(state, 2)
        manager.finish()


def _manager(engine: Any, folder: Path, world_size: int) -> Any:
    from megatron_ft.config.checkpoint import CheckpointConfig
    from megatron_ft.config.identity import JobIdentity, settings_of
    from megatron_ft.mcore.checkpoint.manager import CheckpointManager

    settings = settings_of(engine.config, data_fingerprint="", vocab_size=engines.VOCAB_SIZE)
    return CheckpointManager(
        CheckpointConfig(async_save=False),
        run_dir=folder,
        identity=JobIdentity(run_id="ab" * 16, run_name="convert", settings=settings),
        topology_record={"world_size": world_size},
        group=engine.groups.vote,
        dp_cp_group=engine.groups.pg_collection.dp_cp,
        report=lambda _: None,
    )


if __name__ == "__main__":
    sys.exit(main())
