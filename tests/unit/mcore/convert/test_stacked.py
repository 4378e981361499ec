"""Tests checkpoints of Megatron-LM, in which one tensor has a weight of all layers or experts.

Megatron-Core's own ``dist_checkpointing.save`` writes them, with the names and parts of its layers.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.convert import dense_files
from megatron_ft.mcore.convert.converter import FAMILIES
from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.mcore.convert.megatron_arguments import megatron_arguments, model_of_arguments
from megatron_ft.mcore.convert.streams import StoredValues
from megatron_ft.mcore.convert.weights import weights_manifest
from tests.contract.test_convert import CASES, DEEPSEEK, SMALL, Family
from tools import convert_checkpoint, inspect_checkpoint

_LAYER, _EXPERT = re.compile(r"decoder\.layers\.(\d+)\."), re.compile(r"\.experts\.experts\.(\d+)\.")
KINDS = {
    "one part for each expert": {},
    "one transposed part for all experts": {"is_grouped": True},
    "two parts of each attention matrix": {"num_parts": 2},
    "one tensor for each layer": {"has_numbered_layers": True},
}


@pytest.fixture(autouse=True)
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Form the process group in which Megatron-Core saves."""
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron would start a process that serves a queue, and outlives the test.
    monkeypatch.setattr(filesystem_async, "_results_queue", queue.Queue())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def weights_of(family: Family, model: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {rule.ours: torch.randn(rule.shape(model), generator=generator) for rule in family.tensors(model)}


def joined(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with one tensor for both halves of each gated unit."""
    found = {name: value for name, value in weights.items() if not name.endswith(("weight_w", "weight_v"))}
    for name, value in weights.items():
        if name.endswith("weight_w"):
            found[name[:-2]] = torch.cat([value, weights[name[:-1] + "v"]])
    return found


def save(
    folder: Path,
    model: ModelConfig,
    weights: dict[str, torch.Tensor],
    *,
    is_grouped: bool = False,
    num_parts: int = 1,
    has_numbered_layers: bool = False,
    args: argparse.Namespace | None = None,
) -> Path:
    """Save weights as Megatron-LM does, and return the folder for its option ``--load``."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    state: dict[str, Any] = {}
    for name, value in joined(weights).items():
        offsets, stored, data = list[tuple[int, int, int]](), name, value
        if (layer := _LAYER.search(stored)) and not has_numbered_layers:
            offsets.append((0, int(layer[1]), model.num_layers))
            stored = _LAYER.sub("decoder.layers.", stored)
        if expert := _EXPERT.search(stored):
            number, stored = int(expert[1]), _EXPERT.sub(".experts.experts.", stored)
            if is_grouped:
                if number:
                    continue
                all_experts = [
                    joined(weights)[name.replace(".experts.experts.0.", f".experts.experts.{each}.")]
                    for each in range(model.num_moe_experts or 0)
                ]
                # As the weights of a grouped product lie in memory: [experts, in, out].
                data = torch.stack([each.T.contiguous() for each in all_experts]).transpose(-1, -2)
            else:
                offsets.append((len(offsets), number, model.num_moe_experts or 0))
        axes = len(offsets)
        is_gated = name.endswith("linear_fc1.weight")
        count = 2 * num_parts if is_gated else num_parts if "linear_proj" in name or "linear_qkv.weight" in name else 1
        # Megatron-LM divides the halves of a gated unit among ranks, and writes them as separate parts.
        for number, half in enumerate(data.chunk(count, dim=-2 if is_gated else 0)):
            mine = [*offsets, *([(axes + half.dim() - 2 if is_gated else axes, number, count)] if count > 1 else [])]
            state[f"{name}/{number}"] = ShardedTensor.from_rank_offsets(stored, half, *mine, prepend_axis_num=axes)
    manifest = weights_manifest("theirs", {}, {})
    common = {"args": megatron_arguments(model, manifest, weights_only=True) if args is None else args}
    directory = folder / "iter_0000004"
    directory.mkdir(parents=True)
    dist_checkpointing.save({**common, "iteration": 4, "model": state}, str(directory))
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_expert_of_every_layer_is_a_tensor(kind: str, tmp_path: Path) -> None:
    weights = weights_of(FAMILIES["mixtral"], SMALL)
    reader = DenseReader.open(save(tmp_path / "theirs", SMALL, weights, **KINDS[kind]), trust=True)
    stored = reader.metadata.state_dict_metadata
    assert len(stored) == (24 if kind == "one tensor for each layer" else 10) < len(weights) == 45
    assert reader.weights.keys() == weights.keys()
    for name, value in weights.items():
        assert tuple(reader.weights[name].size) == tuple(value.shape)
        assert torch.equal(reader.read(name), value), name
    # Parts are copied from file to file, and are never in memory, unless a tensor has several parts in a row.
    assert isinstance(reader.values("decoder.layers.2.mlp.experts.experts.1.linear_fc1.weight_v"), StoredValues)


def test_a_part_with_all_experts_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(FAMILIES["mixtral"], SMALL)
    reader = DenseReader.open(save(tmp_path / "theirs", SMALL, weights, is_grouped=True), trust=True)
    # As written by another version of torch, whose parts cannot be copied from file to file.
    other = dense_files._Frame(head=b"other", value_bytes=0, tail=b"")
    monkeypatch.setattr(dense_files, "_frame", lambda dtype, shape: other)
    assert reader.weights.keys() == weights.keys()  # reads ``common.pt``
    loads, load = list[str](), torch.load
    monkeypatch.setattr(torch, "load", lambda *words, **named: loads.append("part") or load(*words, **named))
    for expert in range(3):
        name = f"decoder.layers.1.mlp.experts.experts.{expert}.linear_fc2.weight"
        assert torch.equal(reader.read(name), weights[name])
    assert loads == ["part"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_megatron_becomes_a_folder_of_hugging_face(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder gives the weights back, so the same tensors have the same names in both checkpoints."""
    family = FAMILIES["mixtral"]
    weights = weights_of(family, SMALL)
    theirs = save(tmp_path / "theirs", SMALL, weights, **KINDS[kind])
    words = ["to-hf", str(theirs), str(tmp_path / "hf"), "--family", "mixtral"]
    assert convert_checkpoint.main(words) == CheckpointError.exit_code
    assert "use --trust only if you trust the origin" in capsys.readouterr().err
    assert convert_checkpoint.main([*words, "--trust"]) == 0
    written = load_file(tmp_path / "hf" / "model.safetensors")
    for rule in family.tensors(SMALL):
        for name, value in zip(rule.theirs, rule.layout.split(weights[rule.ours], SMALL), strict=True):
            assert torch.equal(written[name], value), name
    back = ["from-hf", str(tmp_path / "hf"), str(tmp_path / "back"), "--vocab-multiple", "8"]
    assert convert_checkpoint.main(back) == 0
    capsys.readouterr()
    assert inspect_checkpoint.main(["diff", str(theirs), str(tmp_path / "back"), "--trust"]) == 0
    assert capsys.readouterr().out == "0 tensors differ\n"


def test_a_difference_in_one_expert_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = weights_of(FAMILIES["mixtral"], SMALL)
    one = save(tmp_path / "one", SMALL, weights)
    name = "decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight"
    weights[name] = weights[name] + 1
    other = save(tmp_path / "other", SMALL, weights, is_grouped=True)
    assert inspect_checkpoint.main(["diff", str(one), str(other), "--trust", "--json"]) == 1
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["differences"]] == [name]
    assert inspect_checkpoint.main(["list", str(one), "--trust", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert rows.keys() == weights.keys() and rows[name]["shape"] == [8, 12]


def test_layers_of_several_kinds_have_numbers(tmp_path: Path) -> None:
    """Megatron-LM stacks only experts if some layers have none."""
    weights = weights_of(FAMILIES["deepseek"], DEEPSEEK)
    theirs = save(tmp_path / "theirs", DEEPSEEK, weights, has_numbered_layers=True)
    reader = DenseReader.open(theirs, trust=True)
    assert reader.weights.keys() == weights.keys()
    assert all(torch.equal(reader.read(name), value) for name, value in weights.items())
    words = ["to-hf", str(theirs), str(tmp_path / "hf"), "--family", "deepseek", "--trust"]
    assert convert_checkpoint.main(words) == 0


@pytest.mark.parametrize(("family", "model"), CASES)
def test_arguments_describe_the_model(family: Family, model: ModelConfig, tmp_path: Path) -> None:
    theirs = save(tmp_path / "theirs", model, {"embedding.word_embeddings.weight": torch.zeros(1)})
    found = model_of_arguments(theirs / "iter_0000004")
    equal = replace(
        model,
        num_query_groups=found.num_query_groups,
        kv_channels=found.kv_channels,
        moe_aux_loss_coeff=found.moe_aux_loss_coeff,
        moe_z_loss_coeff=found.moe_z_loss_coeff,
    )
    different = [each.name for each in fields(model) if getattr(found, each.name) != getattr(equal, each.name)]
    assert different == []
    assert found.num_query_groups in (model.num_query_groups, model.num_attention_heads)
    family.check(found)


def test_megatrons_distance_between_layers_with_experts_begins_with_the_first(tmp_path: Path) -> None:
    for freq, wanted in ((1, (1, 0)), ([0, 1, 1], (1, 1)), ([0, 1, 0], (2, 0))):
        manifest = weights_manifest("theirs", {}, {})
        args = megatron_arguments(SMALL, manifest, weights_only=True)
        args.moe_layer_freq = freq
        folder = save(tmp_path / str(freq), SMALL, {"embedding.word_embeddings.weight": torch.zeros(1)}, args=args)
        found = model_of_arguments(folder / "iter_0000004")
        assert (found.moe_layer_freq, found.moe_first_dense_layers) == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"squared_relu": True}, "squared_relu=True: not supported by this project"),
        ({"hidden_size": None}, "describe a model that this project does not support"),
        ({"hidden_size": "8"}, "describe a model that this project does not support"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"moe_layer_freq": [1, 0, 1]}, "moe_layer_freq"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0"),
        ({"num_layers": 10**12}, "num_layers=1000000000000"),
        ({"num_layers": 4}, "describe no model with these weights"),
        ({"num_experts": 4}, "describe no model with these weights"),
        ("swiglu", "its arguments lack swiglu"),
        ("all", "has no arguments of Megatron-LM"),
    ],
)
def test_arguments_that_describe_no_model_are_refused(
    change: dict[str, Any] | str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = megatron_arguments(SMALL, weights_manifest("theirs", {}, {}), weights_only=True)
    if isinstance(change, dict):
        vars(args).update(change)
    elif change != "all":
        delattr(args, change)
    weights = weights_of(FAMILIES["mixtral"], SMALL)
    folder = save(tmp_path / "theirs", SMALL, weights, args={} if change == "all" else args)  # type: ignore[arg-type]
    words = ["to-hf", str(folder), str(tmp_path / "hf"), "--family", "mixtral", "--trust"]
    assert convert_checkpoint.main(words) == CheckpointError.exit_code
    error = capsys.readouterr().err
    assert message in error and str(folder) in error and error.count("\n") == 1
    assert not (tmp_path / "hf").exists()


def test_a_name_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    weights = {f"decoder.layers.{layer}.mlp.router.weight": torch.ones(3, 8) for layer in range(3)}
    theirs = save(tmp_path / "theirs", SMALL, weights)
    from torch.distributed.checkpoint.metadata import Metadata

    metadata: Metadata = DenseReader.open(theirs, trust=True).metadata
    entry = metadata.state_dict_metadata["decoder.layers.mlp.router.weight"]
    metadata.state_dict_metadata["decoder.layers.0.mlp.router.weight"] = entry
    reader = DenseReader(directory=theirs / "iter_0000004", manifest=None, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"two tensors contain the weight decoder.layers.0.mlp.router.weight"):
        _ = reader.tensors
