"""Tests the translation of Megatron-LM's flags."""

import shlex
from pathlib import Path

import pytest

import pretrain_moe
from megatron_ft.config.docs import key_docs
from megatron_ft.config.megatron_lm import check_flags, flags, moe_pattern, translate
from megatron_ft.errors import ConfigError
from tools import from_megatron

LISTED = Path(__file__).parents[4] / "shared" / "data" / "megatron" / "flags.txt"
SMALL = "pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2"


def overrides(text: str) -> list[str]:
    """Return the overrides of a command line without its defaults."""
    return [word for answer in translate(shlex.split(text)).answers for word in answer.overrides]


def answer(text: str, name: str) -> tuple[str, str]:
    """Return kind and note of the answer to the flag ``name`` in a command line."""
    (found,) = (each for each in translate(shlex.split(text)).answers if each.given.startswith(f"--{name}"))
    return found.kind, found.note


def test_the_table_answers_every_flag() -> None:
    assert len(flags()) == 670
    keys = {doc.key for doc in key_docs()}
    for flag in flags().values():
        head, _, accepted = flag.answer.partition(" ")
        if head in ("none", "always", "special"):
            assert flag.note, flag.name
        elif accepted.startswith("in "):
            assert head in keys, flag.name
        else:
            named = [word.partition("=")[0] for word in flag.answer.split()]
            assert all(key in keys or "." not in key for key in named), flag.name


@pytest.mark.skipif(not LISTED.exists(), reason="needs ../shared/data/megatron/flags.txt")
def test_recorded_flags_are_answered() -> None:
    lines = [shlex.split(line) for line in LISTED.read_text(encoding="utf-8").splitlines() if line]
    answers = [each for words in lines for each in translate(words).answers]
    assert len(answers) == len(lines) == 84
    assert [each.sentence() for each in answers if each.kind == "refused"] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--num-layers 12", ["model.num_layers=12"]),
        ("--num-layers=12 --num-layers=24", ["model.num_layers=24"]),
        ("--swiglu", ["model.gated_linear_unit=true", "model.activation=silu"]),
        ("--seed 5", ["training.seed=5", "data.seed=5"]),
        ("--bf16", ["precision=bf16"]),
        ("--data-path 0.3 A 0.7 B", ["data.train=[A,B]", "data.train_weights=[0.3,0.7]"]),
        ("--data-path A B", ["data.train=[A,B]"]),
        ("--split 98,2,0", ["data.valid_fraction=0.02"]),
        ("--train-samples 99 --global-batch-size 8", ["training.train_samples=99", "training.global_batch_size=8"]),
        ("--lr-warmup-fraction .1 --train-iters 50",
         ["optimizer.lr_warmup_iterations=5", "training.train_iterations=50"]),
        ("--profile --profile-step-start 4 --profile-step-end 6 --profile-ranks 0 8",
         ["telemetry.profile_first_iteration=5", "telemetry.profile_iterations=2", "telemetry.profile_ranks=[0,8]"]),
        ("--rampup-batch-size 16 8 1000 --lr-decay-samples 5000 --lr-warmup-fraction .1",
         ["training.rampup_batch_size=[16,8,1000]", "optimizer.lr_decay_samples=5000",
          "optimizer.lr_warmup_samples=500"]),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model a/b.model",
         ["data=sentencepiece", "data.tokenizer_file=a/b.model"]),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model a/b.model",
         ["data=huggingface", "data.tokenizer_file=a/tokenizer.json"]),
        ("--exit-interval 50 --exit-duration-in-mins 230",
         ["training.exit_interval_iterations=50", "training.exit_after_minutes=230"]),
        ("--reset-position-ids --eod-mask-loss", ["data.reset_position_ids=true", "data.eod_mask_loss=true"]),
        ("--reset-position-ids --position-embedding-type rope --reset-attention-mask",
         ["model.position_embedding_type=rope", "data.reset_attention_mask=true"]),
        ("--tensorboard-dir d --tensorboard-log-interval 5",
         ["telemetry=tensorboard", "telemetry.log_interval_iterations=5"]),
        ("--distributed-timeout-minutes 2", ["training.distributed_timeout_seconds=120.0"]),
        ("--save a/b --load a/b", ["run.dir=a", "run.name=b", "run.resume=auto"]),
        ("--save a/b --load c", ["run.dir=a", "run.name=b", "checkpoint.load=c"]),
        ("--load c --finetune", ["checkpoint.load_weights=c", "checkpoint.load_weights=c"]),
        ("--vocab-file 'a b.json'", ['data.vocab_file="a b.json"']),
        ("--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
         ["model.num_layers=8", "parallel.pipeline_model_parallel_size=2",
          "parallel.virtual_pipeline_model_parallel_size=2"]),
        ("--num-layers 4 --moe-layer-freq ([0]*1+[1]*3)",
         ["model.num_layers=4", "model.moe_layer_freq=1", "model.moe_first_dense_layers=1"]),
    ],
)  # fmt: skip
def test_flags_become_overrides(text: str, expected: list[str]) -> None:
    assert overrides(text) == expected


@pytest.mark.parametrize(
    ("text", "name", "kind", "note"),
    [
        ("--sequence-parallel", "sequence-parallel", "always", "tensor-parallel size"),
        ("--moe-router-dtype fp32", "moe-router-dtype", "always", "FP32"),
        ("--moe-router-dtype fp64", "moe-router-dtype", "none", "FP64 is not connected"),
        ("--mtp-num-layers 1", "mtp", "none", "no multi-token prediction"),
        ("--num-layers 4 --moe-layer-freq 2", "moe-layer-freq", "none", "no key for another pattern"),
        ("--num-layers 4 --moe-layer-freq [0,1]", "moe-layer-freq", "refused", "a list of 4 numbers"),
        ("--num-layers 61 --pipeline-model-parallel-size 16", "pipeline", "none", "16 does not divide 61"),
        ("--bf16 true", "bf16", "refused", "without a value"),
        ("--num-layers", "num-layers", "refused", "write it as model.num_layers=<value>"),
        ("--distributed-timeout-minutes x", "distributed", "refused", "a number"),
        ("--num-layer 3", "num-layer", "refused", "did you mean 'num-layers'"),
        ("torchrun --nnodes 2 a.py --exit-duration-in-mins 9", "exit-duration-in-mins", "none", "Slurm signals"),
    ],
)
def test_what_has_no_override_has_a_reason(text: str, name: str, kind: str, note: str) -> None:
    assert answer(text, name)[0] == kind
    assert note in answer(text, name)[1]


def test_megatron_counts_moe_layers_from_zero() -> None:
    assert moe_pattern("2", 4) == [1, 0, 1, 0]
    assert moe_pattern("([0]*2+[1,0]*1)", 4) == [0, 0, 1, 0]
    assert moe_pattern("__import__('os')", 4) is None


def test_defaults_that_differ_are_stated() -> None:
    translation = translate(shlex.split(f"{SMALL} --num-experts 4 --tensor-model-parallel-size 2"))
    words = translation.overrides
    for expected in (
        "model.normalization=LayerNorm",
        "model.hidden_dropout=0.1",
        "model.ffn_hidden_size=512",
        "model.moe_ffn_hidden_size=null",
        "parallel.expert_tensor_parallel_size=2",
        "optimizer.adam_beta2=0.999",
    ):
        assert expected in words
    assert "model.num_moe_experts=null" in translate(shlex.split(SMALL)).overrides
    assert "model.normalization=RMSNorm" in translate(shlex.split(f"{SMALL} --normalization RMSNorm")).overrides


def test_the_entry_point_answers_all_flags_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--num-layers",
        "12",
        "launch.ranks_per_node=2",
        "--sequence-parallel",
        "--tensorboard-queue-size=1",
        "--nonsense",
    ]
    assert pretrain_moe.main(words) == ConfigError.exit_code
    lines = capsys.readouterr().err.splitlines()
    starts = (
        "error: --num-layers=12: must be written as",
        "--sequence-parallel: must be left out",
        "--tensorboard-queue-size=1: has no",
        "--nonsense: must be --help",
    )
    assert len(lines) == 4 and all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    with pytest.raises(ConfigError, match="must be written as recovery.min_nodes=3"):
        check_flags(["--min-nodes=3"])
    with pytest.raises(ConfigError, match="must be --help"):
        check_flags(["-x"])


def test_the_tool_translates_checks_and_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = shlex.split(f"{SMALL} --global-batch-size 8 --num-experts 4 --mock-data --disable-bias-linear")
    path = tmp_path / "mine.yaml"
    assert from_megatron.main(["--dry-run", "--yaml", str(path), "--", *words]) == 0
    out = capsys.readouterr().out
    assert "--mock-data  ->  data=stdlib" in out and "cost of a loss" in out
    assert "override /data: stdlib" in path.read_text()
    assert from_megatron.main(["--yaml", str(path), "--", *words]) == 2, "the file exists"
    assert from_megatron.main(["--format", "command", "--", *words, "--num-layer", "3"]) == 2
    assert "pretrain_moe.py data=stdlib" in capsys.readouterr().out
