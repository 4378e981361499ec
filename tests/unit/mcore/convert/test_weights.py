"""Tests checkpoints that contain only weights: copies keep all bits, means are rounded once, and checkpoints that do
not fit together are refused by name."""

import shutil
import weakref
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_ft.config.model import ModelConfig
from megatron_ft.mcore.convert import dense_files
from megatron_ft.mcore.convert.dense_files import WEIGHTS_ONLY, DenseReader
from megatron_ft.mcore.convert.model_tensors import tensors_of
from megatron_ft.mcore.convert.weights import weights_manifest, write_weights
from tests.unit.mcore.convert.test_upcycle import save_dense
from tools import convert_checkpoint, inspect_checkpoint
from transformer_engine_ext.codec import export
from transformer_engine_ext.formats import E4M3
from transformer_engine_ext.quantized import quantize_blocks

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=64,
    ffn_hidden_size=24,
    num_moe_experts=None,
    moe_ffn_hidden_size=None,
)
BASE = {f"model.{name}": value for name, value in vars(MODEL).items()}
SHAPES = dict(tensors_of(MODEL))
NAMES = tuple(SHAPES)
NUM_BYTES = sum(2 * prod(shape) for shape in SHAPES.values())
EMBEDDING, NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"


def random(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def write(path: Path, tensors: Mapping[str, torch.Tensor], **model: Any) -> Path:
    """Write a checkpoint of these tensors. ``model`` are keys of the model that differ from the default."""
    settings = {**BASE, **{f"model.{name}": value for name, value in model.items()}, "training.seed": 7}
    write_weights(path, iter(tensors.items()), weights_manifest("run", settings, {}), num_bytes=0, most_file_bytes=2000)
    return path


def run(*words: object, code: int = 0) -> None:
    assert convert_checkpoint.main([str(word) for word in words]) == code


def read(path: Path) -> dict[str, torch.Tensor]:
    reader = DenseReader.open(path)
    return {name: reader.read(name) for name in reader.weights}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_mean_is_computed_in_wide_numbers_and_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    parts = [random(seed, dtype) for seed in range(3)]
    paths = [write(tmp_path / str(number), part) for number, part in enumerate(parts)]
    run("average", *paths, tmp_path / "mean")
    run("average", *paths, tmp_path / "weighted", "--weights", 0.5, 0.125, 0.375)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    means, weighted = read(tmp_path / "mean"), read(tmp_path / "weighted")
    rounded_often = 0
    for name in NAMES:
        one, two, three = (part[name].to(wide) for part in parts)
        assert same_bits(means[name], ((one + two + three) / 3).to(dtype))
        assert same_bits(weighted[name], (one * 0.5 + two * 0.125 + three * 0.375).to(dtype))
        narrow = sum(part[name] for part in parts) / 3
        rounded_often += int((narrow != means[name]).sum())
    assert (rounded_often > 0) == (dtype in (torch.bfloat16, torch.float16)), "rounding every sum would not be noticed"


def test_the_mean_of_equal_checkpoints_is_the_checkpoint(tmp_path: Path) -> None:
    tensors = random(1)
    paths = [write(tmp_path / str(number), tensors) for number in range(3)]
    run("average", *paths, tmp_path / "mean")
    found = read(tmp_path / "mean")
    assert all(same_bits(found[name], tensors[name]) for name in NAMES)
    manifest = DenseReader.open(tmp_path / "mean").manifest
    assert manifest is not None
    assert manifest.settings["model"] == BASE, "the seed is not that of these weights"
    assert [each["factor"] for each in manifest.settings[WEIGHTS_ONLY]["mean_of"]] == [1 / 3] * 3


def test_one_tensor_of_each_checkpoint_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path / str(number), random(number)) for number in range(3)]
    known, most = list[weakref.ref[torch.Tensor]](), 0
    original = dense_files.DenseReader.read

    def counted(self: DenseReader, name: str) -> torch.Tensor:
        nonlocal most
        found = original(self, name)
        known.append(weakref.ref(found))
        most = max(most, sum(each() is not None for each in known))
        return found

    monkeypatch.setattr(dense_files.DenseReader, "read", counted)
    run("average", *paths, tmp_path / "mean")
    assert len(known) == 3 * len(NAMES) and most <= 3


def test_buffers_of_integers_must_be_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts, flags = torch.tensor([3, 2**60 + 1]), torch.tensor([True, False])
    same = {**random(0), "counts": counts, "flags": flags}
    one, two = (write(tmp_path / name, same) for name in "ab")
    run("average", one, two, tmp_path / "mean")
    assert same_bits(read(tmp_path / "mean")["counts"], counts)
    assert same_bits(read(tmp_path / "mean")["flags"], flags)
    other = write(tmp_path / "c", {**same, "counts": counts + 1})
    run("average", one, other, tmp_path / "none", code=5)
    error = capsys.readouterr().err
    assert "counts differs from the same tensor in" in error and "torch.int64 cannot be averaged" in error
    assert not (tmp_path / "none").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("tensors", "model", "message"),
    [
        ({NORM: None}, {}, f"manifest describes (at most 3 are named): ['{NORM}']"),
        ({"counts": torch.ones(2)}, {}, "unexpected tensors: ['counts']"),
        ({NORM: torch.ones(15, dtype=torch.bfloat16)}, {}, f"{NORM} has the shape [15], but the model of its manifest"),
        ({NORM: torch.ones(16)}, {}, f"{NORM} is torch.float32 [16], but in"),
        ({}, {"num_attention_heads": 4}, "model.num_attention_heads is 2 in the first and 4 here"),
        ({}, {"rotary_base": 7}, "model.rotary_base is 10000 in the first and 7 here"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(
    tensors: dict[str, Any],
    model: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed = {name: value for name, value in {**random(1), **tensors}.items() if value is not None}
    one = write(tmp_path / "one", random(0))
    other = write(tmp_path / "other", changed, **model)
    run("average", one, other, tmp_path / "mean", code=5)
    error = capsys.readouterr().err
    assert message in error and str(other) in error
    assert not (tmp_path / "mean").exists()


def test_settings_that_do_not_change_outputs_may_differ(tmp_path: Path) -> None:
    one = write(tmp_path / "one", random(0))
    run("average", one, write(tmp_path / "b", random(1), moe_aux_loss_coeff=0.5, init_method_std=1.0), tmp_path / "m")


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([1.0], "must be 2 numbers"),
        ([0.5, 0.25, 0.25], "must be 2 numbers"),
        ([0.5, 0.4], "the sum is 0.9"),
        ([1.5, -0.5], "must be from 0 to 1"),
        ([float("nan"), 0.5], "must be from 0 to 1"),
    ],
)
def test_other_factors_are_refused(
    factors: list[float], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write(tmp_path / str(number), random(number)) for number in range(2)]
    run("average", *paths, tmp_path / "mean", "--weights", *factors, code=2)
    assert message in capsys.readouterr().err and not (tmp_path / "mean").exists()


def test_outputs_and_inputs_are_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (write(tmp_path / str(number), random(number)) for number in range(2))
    for words in (("average", one, two), ("weights", one)):
        run(*words, two, code=2)
        assert f"out={two}: must not exist" in capsys.readouterr().err
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        run(*words, tmp_path / "link", code=2)
        (tmp_path / "link").unlink()
        with monkeypatch.context() as patch:
            patch.setattr("megatron_ft.mcore.convert.folder.free_bytes", lambda path: 3000)
            run(*words, tmp_path / "out", code=2)
        assert f"needs {NUM_BYTES:,} bytes, but its file system has only 3,000" in capsys.readouterr().err
        run(*words, tmp_path / "out", "--file-bytes", 0, code=2)
    run("average", one, tmp_path / "out", code=2)
    assert "must be at least 2 checkpoints" in capsys.readouterr().err
    damaged = Path(shutil.copytree(two, tmp_path / "damaged"))
    path = damaged / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    for words in (("average", one, damaged), ("weights", damaged)):
        run(*words, tmp_path / "out", code=5)
        assert f"{path}: damaged" in capsys.readouterr().err
    (damaged / "manifest.json").unlink()
    run("weights", damaged, tmp_path / "out", code=5)
    assert "has no manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", [EMBEDDING, NORM, "decoder.layers.0.mlp.linear_fc1.weight_v", "output_layer.weight"])
@pytest.mark.parametrize("command", ["weights", "upcycle", "to-megatron"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"upcycle": ("--experts", 4, "--topk", 2)}.get(command, ())
    source = write(tmp_path / "source", random(0))
    run(command, source, tmp_path / "whole", *options)
    lacking = write(tmp_path / "lacking", {own: value for own, value in random(0).items() if own != name})
    reshaped = write(tmp_path / "reshaped", {**random(0), name: torch.ones(3)})
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    run(command, lacking, tmp_path / "out", *options, code=5)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"{lacking}: lacks tensors of the model")
    assert f": ['{name}']; use" in printed.err
    run(command, reshaped, tmp_path / "out", *options, code=5)
    assert f"{name} has the shape [3]" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before, "something was written"
    assert inspect_checkpoint.main(["verify", str(lacking)]) == 5
    assert name in capsys.readouterr().err
    assert inspect_checkpoint.main(["strategies", str(lacking)]) == 0
    found = capsys.readouterr().out
    assert "checkpoint.load_weights  no   lacks tensors of the model" in found and f": ['{name}']" in found


def test_weights_keep_their_bits(tmp_path: Path) -> None:
    special = torch.tensor([float("nan"), -0.0, 1e-45, float("inf")])
    tensors = {**random(0), "special": special, "counts": torch.tensor([2**60 + 1]), "flags": torch.tensor([True])}
    source = write(tmp_path / "source", tensors)
    run("weights", source, tmp_path / "copy")
    copied = read(tmp_path / "copy")
    assert copied.keys() == tensors.keys() and all(same_bits(copied[name], tensors[name]) for name in tensors)
    run("weights", source, tmp_path / "wide", "--dtype", "fp32")
    wide = read(tmp_path / "wide")
    for name in tensors:
        wanted = tensors[name].float() if tensors[name].is_floating_point() else tensors[name]
        assert same_bits(wide[name], wanted)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, count = write(tmp_path / "source", random(0)), 0
    original = dense_files.HashedFile.write

    def interrupted(self: Any, data: Any) -> int:
        nonlocal count
        count += 1
        if count > 5:  # in the second tensor
            raise OSError(28, "No space left on device")
        return int(original(self, data))

    with monkeypatch.context() as patch:
        patch.setattr(dense_files.HashedFile, "write", interrupted)
        run("weights", source, tmp_path / "copy", code=3)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    run("weights", source, tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["fp8_fp8_fp8_fp16", "fp8_fp32_fp32_fp32"])
def test_exported_weights_are_the_values_of_fp8_codes(
    regime: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of FP8 layers are the master weights in E4M3, and other weights are the master weights in BF16. FP32
    and BF16, also in a Hugging Face folder, have exactly these values."""
    fp8 = {"precision.params_dtype": "bf16", "precision.fp8": "hybrid", "precision.fp8_recipe": "blockwise"}
    experts = {"model.num_moe_experts": 2, "model.moe_ffn_hidden_size": 48}
    saved, _ = save_dense(tmp_path, {**fp8, **experts, "precision.regime": regime, "model.num_layers": 1})
    run("to-megatron", saved, tmp_path / "megatron", code=2)
    assert f"precision.regime={regime}" in capsys.readouterr().err and not (tmp_path / "megatron").exists()
    run("weights", saved, tmp_path / "fp32", "--dtype", "fp32")
    run("weights", saved, tmp_path / "bf16", "--dtype", "bf16")
    run("to-hf", saved, tmp_path / "hf", "--family", "mixtral", "--dtype", "fp32")
    found, short = read(tmp_path / "fp32"), read(tmp_path / "bf16")
    assert all(short[name].dtype is torch.bfloat16 and same_bits(short[name].float(), found[name]) for name in found)
    wanted = weights_by_masters(saved)
    assert wanted.keys() == found.keys()
    assert all(same_bits(found[name], wanted[name]) for name in wanted)
    theirs = [load_file(path) for path in (tmp_path / "hf").glob("*.safetensors")]
    (exported,) = [file[HF_PROJECTION] for file in theirs if HF_PROJECTION in file]
    assert same_bits(exported, found["decoder.layers.0.self_attention.linear_proj.weight"])


HF_PROJECTION = "model.layers.0.self_attn.o_proj.weight"
OTHER_NAMES = {
    ".mlp.experts.local_experts.": ".mlp.experts.experts.",
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""Beginnings of the names of parameters, and of the tensors of a checkpoint."""


def weights_by_masters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights that follow from the stored master weights, in FP32 and by the names of the weights."""
    reader = DenseReader.open(checkpoint)
    stored = {name.removeprefix("optimizer.state."): reader.read(name) for name in reader.tensors}
    found = {}
    for parameter in [name.removeprefix("master.") for name in stored if name.startswith("master.")]:
        codes, scales = stored[f"master.{parameter}"], stored.get(f"master_scales.{parameter}")
        parts = {"master": codes.view(torch.float8_e4m3fn) if codes.dtype is torch.uint8 else codes}
        master = export(parts if scales is None else {**parts, "master_scales": scales}, torch.float32)["master"]
        is_fp8 = ".linear_" in parameter
        if is_fp8 and codes.dtype is torch.uint8:
            values = master
        else:
            values = quantize_blocks(master, E4M3).decode() if is_fp8 else master.bfloat16().float()
        name = parameter
        for ours, theirs in OTHER_NAMES.items():
            name = name.replace(ours, theirs)
        if name in stored:
            found[name] = values.view(stored[name].shape)
        else:
            halves = values.view(-1, stored[f"{name}_w"].shape[1]).chunk(2)
            found |= {f"{name}_{half}": rows for half, rows in zip("wv", halves, strict=True)}
    return found
