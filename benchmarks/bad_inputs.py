"""Lists wrong configurations and damaged files for the claim ``bad-config``, each with its expected message."""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_ft.corpus.indexed import IndexedWriter, bin_path, idx_path
from megatron_ft.corpus.tokenizers import byte_letters

LONG_ENOUGH_TOKENS = 40_000
HEADER = struct.Struct("<9sQBQQ")
"""Head of Megatron's ``.idx`` files: magic, version, dtype code, number of sequences, number of document entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Command line of the entry point that must fail with one message. The message must contain every text of
    ``says``."""

    overrides: tuple[str, ...]
    says: tuple[str, ...]
    exit_code: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    preprocess: bool = False
    """Whether the command line is one of ``tools/preprocess_data.py`` instead."""

    @property
    def name(self) -> str:
        """Return the command line as reports show it."""
        return " ".join(self.overrides)


def bad(*overrides: str, says: Sequence[str], exit_code: int = 2, environment: dict[str, str] | None = None) -> Case:
    """Return a case whose command line consists of ``overrides``."""
    return Case(overrides=overrides, says=tuple(says), exit_code=exit_code, environment=environment or {})


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}

SYNTAX = [
    bad("modle.num_layers=3", says=["modle.num_layers=3", "not a known key", "model.num_layers"]),
    bad("+model.num_layer=3", says=["model.num_layer=3", "not a known key", "model.num_layers"]),
    bad("train_iterations=3", says=["train_iterations=3", "training.train_iterations"]),
    bad("model={num_layerz: 2}", says=["model.num_layerz=2", "not a known key"]),
    bad("model=mixtrl_8x7b", says=["model=mixtrl_8x7b", "must be one of", "mixtral_8x7b"]),
    bad("modle=moe_tiny", says=["modle=moe_tiny", "not a known key"]),
    bad("training.train_iterations=many", says=["training.train_iterations=many", "int"]),
    bad("training.train_iterations=1.5", says=["training.train_iterations=1.5", "int"]),
    bad("training.train_iterations=null", says=["training.train_iterations", "int"]),
    bad("training.deterministic=perhaps", says=["training.deterministic=perhaps", "bool"]),
    bad("data.train=3", says=["data.train=3", "list of str"]),
    bad("optimizer.lr=fast", says=["optimizer.lr=fast", "float"]),
    bad("model.num_layers=2,4", says=["model.num_layers=2,4", "must be a single value"]),
    bad("training.seed=${nowhere}", says=["training.seed=${nowhere}", "must refer only to keys"]),
    bad("~model.num_layers", says=["~model.num_layers", "must not be deleted"]),
    bad("model.num_layers 3", says=["model.num_layers 3", "must be key=value"]),
    bad("--num-layers=3", says=["--num-layers=3", "model.num_layers=3"]),
    bad("hydra.run.dir=elsewhere", says=["hydra.run.dir=elsewhere", "not a known key"]),
]

LAYOUT = [
    bad("recovery.strategies=[replicas]", says=["recovery.strategies=replicas", "is now called living_state"]),
    bad("recovery.strategies=[chekpoint]", says=["recovery.strategies=chekpoint", "must be one of", "checkpoint"]),
    bad("recovery=rollback", says=["snapshot.policy=null", "must be given", "recovery.strategies=[rollback]"]),
    bad("recovery=living_state", says=["placement.algorithm=null", "recovery.strategies=[living_state]"]),
    bad("launch.num_nodes=0", says=["launch.num_nodes=0", "at least 1"]),
    bad("launch.ranks_per_node=-2", says=["launch.ranks_per_node=-2", "at least 1"]),
    bad(
        "launch.ranks_per_node=3",
        "parallel.tensor_model_parallel_size=2",
        says=["launch.num_nodes * launch.ranks_per_node=3", "multiple of TP * PP * CP"],
    ),
    bad("parallel=ep2", says=["parallel.expert_model_parallel_size=2", "must", "divide"]),
    bad(
        "launch.ranks_per_node=3",
        "parallel.expert_model_parallel_size=3",
        says=["parallel.expert_model_parallel_size=3", "must divide model.num_moe_experts=8"],
    ),
    bad(
        "launch.ranks_per_node=3",
        "parallel.pipeline_model_parallel_size=3",
        says=["model.num_layers=4", "multiple of PP * VPP", "=3"],
    ),
    bad(
        "parallel.virtual_pipeline_model_parallel_size=2",
        says=["parallel.virtual_pipeline_model_parallel_size=2", "must be null"],
    ),
    bad(
        "launch.ranks_per_node=2",
        "parallel.context_parallel_size=2",
        "training.device=cpu",
        says=["parallel.context_parallel_size=2", "must be 1", "Transformer Engine"],
    ),
    bad("parallel.overlap_param_gather=true", says=["parallel.overlap_param_gather=true", "must be false"]),
    bad(
        "launch.ranks_per_node=2",
        "parallel.tensor_model_parallel_size=2",
        "model.num_query_groups=1",
        says=["model.num_query_groups=1", "multiple of parallel.tensor_model_parallel_size=2"],
    ),
    bad("control.interface=0.0.0.0", says=["control.interface=0.0.0.0", "must not mean all network interfaces"]),
    bad("testing.failpoints=['explode()']", says=["testing.failpoints=explode()", "must"]),
    bad(
        "testing.failpoints=['kill(rank=5,phase=\"forward\")']",
        says=["testing.failpoints=kill(rank=5", "must name a rank in 0..0"],
    ),
    bad("launch=srun", says=["launch.mode=srun", "must be local"]),
    bad(
        "launch.ranks_per_node=4",
        environment=TORCHRUN,
        says=["launch.ranks_per_node=4", "must be 2, the value of torchrun"],
    ),
    bad(environment={**TORCHRUN, "RANK": "7"}, says=["launch.mode=torchrun", "rank 7", "must"]),
]

VALUES = [
    bad("model.num_layers=0", says=["model.num_layers=0", "at least 1"]),
    bad("model.num_attention_heads=3", says=["model.num_attention_heads=3", "must divide model.hidden_size=128"]),
    bad("model.moe_router_topk=9", says=["model.moe_router_topk=9", "1..model.num_moe_experts=8"]),
    bad("model.moe_router_topk=1", says=["model.moe_router_pre_softmax=false", "must be true"]),
    bad(
        "model.moe_router_load_balancing_type=sinkhorn",
        says=["model.moe_aux_loss_coeff=0.01", "must be 0", "sinkhorn"],
    ),
    bad(
        "model.moe_pad_expert_input_to_capacity=true",
        says=["model.moe_pad_expert_input_to_capacity=true", "moe_expert_capacity_factor"],
    ),
    bad("model.max_position_embeddings=64", says=["model.seq_length=128", "must not exceed", "=64"]),
    bad("model.hidden_dropout=1.5", says=["model.hidden_dropout=1.5", "[0, 1)"]),
    bad("model.activation=relu", says=["model.activation=relu", "must be one of silu, gelu"]),
    bad("model.vocab_size=10", says=["model.vocab_size=10", "at least 257"]),
    bad("training.global_batch_size=15", says=["training.global_batch_size=15", "multiple", "micro_batch_size=2"]),
    bad("training.device=tpu", says=["training.device=tpu", "must be one of cpu, cuda, auto"]),
    bad("optimizer.lr=nan", says=["optimizer.lr=nan", "must be a finite number"]),
    bad("optimizer.lr=0", says=["optimizer.lr=0", "must be greater than 0"]),
    bad("optimizer.adam_beta2=1.0", says=["optimizer.adam_beta2=1.0", "[0, 1)"]),
    bad("optimizer.lr_warmup_iterations=60", says=["optimizer.lr_warmup_iterations=60", "must be less than", "=60"]),
    bad("precision.fp8=e5m2", says=["precision.fp8=e5m2", "must be one of e4m3, hybrid"]),
    bad("checkpoint.keep_last=-1", says=["checkpoint.keep_last=-1", "at least 0"]),
    bad("run.name=../up", says=["run.name=../up", "must be"]),
    bad("run.resume=must", says=["run.name=null", "must be given"]),
    bad("data.train=[]", says=["data.train=[]", "at least one source"]),
    bad("data.train_weights=[1,2]", says=["data.train_weights=[1.0, 2.0]", "as many weights"]),
    bad("data.tokenizer=gpt2", says=["data.vocab_file=null", "must be given"]),
]


def file_cases(folder: Path) -> list[Case]:
    """Write damaged files into ``folder``, and return the cases whose command lines name them."""
    return [*_indexed_cases(folder), *_vocabulary_cases(folder), *_memory_cases(folder), *_text_cases(folder)]


def good_source(folder: Path, name: str = "good") -> Path:
    """Write a valid dataset of bytes that is long enough for any split. Return its prefix."""
    prefix = folder / name
    if not idx_path(prefix).exists():
        tokens = np.arange(LONG_ENOUGH_TOKENS, dtype=np.uint16) % 256
        with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
            writer.add_document(tokens)
    return prefix


def _indexed_cases(folder: Path) -> list[Case]:
    def damaged(name: str, *says: str) -> Case:
        prefix = folder / name
        return bad(f"data.train=[{prefix}]", says=[f"data.train[0]={prefix}", *says], exit_code=3)

    good_source(folder, "no_idx")
    idx_path(folder / "no_idx").unlink()
    good_source(folder, "no_bin")
    bin_path(folder / "no_bin").unlink()
    rewrite(idx_path(good_source(folder, "short_idx")), lambda content: content[:-5])
    rewrite(idx_path(good_source(folder, "empty_idx")), lambda content: b"")
    rewrite(idx_path(good_source(folder, "magic")), lambda content: b"NOTANIDX\x00" + content[9:])
    rewrite(idx_path(good_source(folder, "version")), lambda content: content[:9] + b"\x07" + content[10:])
    rewrite(idx_path(good_source(folder, "dtype")), lambda content: content[:17] + b"\x06" + content[18:])
    rewrite(bin_path(good_source(folder, "short_bin")), lambda content: content[:-2])
    rewrite(bin_path(good_source(folder, "ids")), lambda content: b"\xff\xff" * (len(content) // 2))
    no_text = HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, 0, 1) + struct.pack("<q", 0)
    idx_path(folder / "no_text").write_bytes(no_text)
    bin_path(folder / "no_text").write_bytes(b"")
    with IndexedWriter(folder / "tiny", np.dtype(np.uint16)) as writer:
        writer.add_document(np.arange(5, dtype=np.uint16))
    return [
        damaged("nowhere", "no such file"),
        damaged("no_idx", ".idx", "no such file"),
        damaged("no_bin", ".bin", "no such file"),
        damaged("short_idx", "bytes=", "must be"),
        damaged("empty_idx", "bytes=0", "must be at least"),
        damaged("magic", "magic=", "must be"),
        damaged("version", "version=7", "must be 1"),
        damaged("dtype", "dtype code=6", "must be an integer format"),
        damaged("short_bin", ".bin", "bytes=", "must be"),
        damaged("ids", "65535", "must be from 0 to"),
        damaged("no_text", "tokens=0", "must be at least 1"),
        damaged("tiny", "5"),
    ]


def _vocabulary_cases(folder: Path) -> list[Case]:
    letters = {letter: number for number, letter in enumerate(byte_letters())}
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps(letters), encoding="utf-8")
    merges.write_text("#version: 0.2\nt h\n", encoding="utf-8")
    broken, empty = folder / "broken.json", folder / "empty.json"
    broken.write_text('{"a": ', encoding="utf-8")
    empty.write_bytes(b"")
    twice = folder / "twice.json"
    twice.write_text(json.dumps({**letters, "th": 5}), encoding="utf-8")
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    lacking = folder / "tokenizer.json"
    lacking.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}), encoding="utf-8")

    def gpt2(vocab_file: Path, *says: str) -> Case:
        files = (f"data.vocab_file={vocab_file}", f"data.merges_file={merges}")
        return bad("data.tokenizer=gpt2", *files, says=[str(vocab_file), *says], exit_code=3)

    def huggingface(file: Path, *says: str) -> Case:
        overrides = ("data.tokenizer=huggingface", f"data.tokenizer_file={file}")
        return bad(*overrides, says=[str(file), *says], exit_code=3)

    return [
        gpt2(vocab, "'th'", "needs"),
        gpt2(broken, "JSON"),
        gpt2(twice, "id 5", "must belong to one entry"),
        gpt2(folder / "nowhere.json", "data.vocab_file=", "must be an existing file"),
        huggingface(lacking, "'ab'", "needs"),
        huggingface(empty, "empty"),
    ]


def _memory_cases(folder: Path) -> list[Case]:
    source = f"data.train=[{good_source(folder)}]"
    return [
        bad(source, "limits.host_memory_bytes=1000", says=["limits.host_memory_bytes=1000", "must be at least"]),
        bad(
            source,
            "training.device=cuda",
            "limits.gpu_memory_bytes=1000",
            "dry_run=true",  # otherwise a machine without GPUs refuses the device first
            says=["limits.gpu_memory_bytes=1000", "must be at least"],
        ),
    ]


def _text_cases(folder: Path) -> list[Case]:
    empty, latin, lines = folder / "empty.txt", folder / "latin.txt", folder / "lines.jsonl"
    empty.write_bytes(b"")
    latin.write_bytes(b"caf\xe9")
    lines.write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")

    def preprocess(file: Path, *says: str) -> Case:
        options = ("--input", str(file), "--output-prefix", str(folder / f"from_{file.stem}"))
        return Case(overrides=options, says=(str(file), *says), exit_code=3, preprocess=True)

    return [
        preprocess(empty, "empty"),
        preprocess(latin, "UTF-8"),
        preprocess(lines, "line 2"),
        preprocess(folder / "none.txt", "no"),
    ]


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace a file's content by ``change`` of it, to damage the file."""
    path.write_bytes(change(path.read_bytes()))
