"""Claim ``megatron-flags``: every flag of Megatron-LM is answered, and translated command lines pass a dry run.

The command lines of Mixtral 8x7B and DeepSeek-V3 have the flags of the examples in Megatron-LM's repository. Their
data, splits and tokenizers are replaced by those of small files, because a dry run reads the files.
"""

import contextlib
import functools
import io
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import pretrain_moe
from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from megatron_ft.config.docs import key_docs
from megatron_ft.config.megatron_lm import Flag, Translation, flags, translate
from megatron_ft.corpus.indexed import IndexedWriter
from megatron_ft.errors import MegatronFtError
from megatron_ft.testing.jobs import inside

ID = "megatron-flags"
LISTED = ROOT.parent / "shared" / "data" / "megatron" / "flags.txt"
MIN_FLAGS = 184
MIXTRAL = """
torchrun --nproc_per_node 8 --nnodes 8 --node_rank 0 --master_addr localhost --master_port 6000 pretrain_gpt.py
--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer
--tokenizer-model tokenizer.model --data-path text_document --split 989,10,1 --micro-batch-size 1
--global-batch-size 256 --lr 1e-4 --train-iters 500 --lr-decay-iters 320 --lr-decay-style cosine
--min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 50 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1
--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel
--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save checkpoints/mixtral
--load checkpoints/mixtral --tensorboard-dir checkpoints/tensorboard --no-load-optim --no-load-rng
--wandb-project Mixtral --wandb-exp-name Mixtral_8x7B
"""
DEEPSEEK = """
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --distributed-timeout-minutes 60
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 16 --decoder-first-pipeline-num-layers 4
--decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 64 --context-parallel-size 1
--expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--use-mcore-models --sequence-parallel --use-flash-attn --disable-bias-linear --micro-batch-size 1
--global-batch-size 8192 --train-samples 585937500 --exit-duration-in-mins 220 --no-check-for-nan-in-loss-and-grad
--cross-entropy-loss-fusion --cross-entropy-fusion-impl te --manual-gc --manual-gc-interval 10
--transformer-impl transformer_engine --seq-length 4096 --data-cache-path cache
--tokenizer-type HuggingFaceTokenizer --tokenizer-model . --data-path text_document --split 99,1,0
--no-mmap-bin-files --no-create-attention-mask-in-dataloader --num-workers 6 --num-layers 61 --hidden-size 7168
--ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 --max-position-embeddings 4096
--position-embedding-type rope --rotary-base 10000 --make-vocab-size-divisible-by 3232 --normalization RMSNorm
--norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights --multi-latent-attention --attention-dropout 0.0
--hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --qk-layernorm --lr-decay-samples 584765624
--lr-warmup-samples 1536000 --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine
--adam-beta1 0.9 --adam-beta2 0.95 --num-experts 256 --moe-layer-freq [0]*3+[1]*58 --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8
--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-router-pre-softmax --moe-grouped-gemm
--moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
--moe-router-dtype fp32 --moe-permute-fusion --moe-router-force-load-balancing --q-lora-rank 1536
--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40
--mscale 1.0 --mscale-all-dim 1.0 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --eval-iters 32
--eval-interval 100 --auto-detect-ckpt-format --load checkpoints/v3 --save checkpoints/v3 --save-interval 100
--dist-ckpt-strictness log_all --init-method-std 0.02 --log-timers-to-tensorboard --log-memory-to-tensorboard
--log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard --log-throughput --log-interval 1
--logging-level 40 --tensorboard-dir checkpoints/tensorboard --wandb-project release-runs --bf16 --enable-experimental
"""
_NAMED = {
    "--mtp-num-layers": "multi-token prediction",
    "--decoder-first-pipeline-num-layers": "uneven split",
    "--decoder-last-pipeline-num-layers": "uneven split",
    "--pipeline-model-parallel-size": "16 does not divide",
}
"""Flags of DeepSeek-V3 that no key replaces, and a text that the reason for each must contain."""
_SAMPLES = {
    "moe-layer-freq": "1",
    "split": "98,2,0",
    "tokenizer-type": "GPT2BPETokenizer",
    "rope-type": "rope",
    "distributed-timeout-minutes": "10",
}
"""Sample values of flags whose value is translated, not copied to a key."""


def main(argv: Sequence[str] | None = None) -> int:
    """Answer all flags and translate both command lines."""
    arguments = parse_arguments(__doc__, argv)
    problems = [*flag_problems(), *key_problems(), *listed_problems()]
    kinds = Counter(_kind(flag) for flag in flags().values())
    with tempfile.TemporaryDirectory(prefix="megatron-flags-") as name, inside(Path(name)):
        _write_inputs(Path(name))
        deepseek_text = DEEPSEEK
        if arguments.quick:  # a dry run takes a time proportional to the number of operators
            deepseek_text = DEEPSEEK.replace("--num-layers 61", "--num-layers 7").replace("[1]*58", "[1]*4")
        mixtral, deepseek = (translate(shlex.split(text)) for text in (MIXTRAL, deepseek_text))
        for model, translation in (("Mixtral", mixtral), ("DeepSeek-V3", deepseek)):
            problems += [f"{model}: {answer.sentence()}" for answer in translation.with_kind("refused")]
            problems += [f"{model}: {text}" for text in _dry_run(translation)]
    reasons = {answer.given.partition("=")[0]: answer.note for answer in deepseek.with_kind("none")}
    problems += [
        f"DeepSeek-V3: {flag} is not named" for flag, text in _NAMED.items() if text not in reasons.get(flag, "")
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    return finish(
        arguments.out,
        ID,
        passed=not problems and len(flags()) >= MIN_FLAGS,
        figure=(
            f"{len(flags())} of {len(flags())} answered: {kinds['key']} by keys, {kinds['always']} always so, "
            f"{kinds['none']} without a counterpart; 2 of 2 dry runs pass"
            if not problems
            else f"{len(problems)} problems"
        ),
        threshold=f"all of at least {MIN_FLAGS} flags answered, both command lines pass a dry run",
        counts={
            "flags": len(flags()),
            **{kind: kinds[kind] for kind in ("key", "always", "none")},
            "mixtral_flags": len(mixtral.answers),
            "mixtral_without_counterpart": len(mixtral.with_kind("none")),
            "deepseek_flags": len(deepseek.answers),
            "deepseek_without_counterpart": len(deepseek.with_kind("none")),
            "problems": len(problems),
        },
        details={"problems": problems, "table": "megatron_ft/config/megatron_flags.txt"},
    )


def _kind(flag: Flag) -> str:
    head = flag.answer.partition(" ")[0]
    return head if head in ("always", "none") else "key"


def flag_problems() -> list[str]:
    """Return the flags that the translation refuses, or answers without a key and without a reason."""
    found = []
    for flag in flags().values():
        (answer,) = (each for each in translate(_words(flag)).answers)
        if answer.kind == "refused" or not (answer.overrides or answer.note):
            found.append(answer.sentence())
    return found


def key_problems() -> list[str]:
    """Return the flags whose overrides Hydra and the types of the keys do not accept."""
    found = []
    last = {
        word.partition("=")[0]: word
        for flag in flags().values()
        for word in translate(_words(flag)).answers[0].overrides
    }
    try:
        pretrain_moe.compose(list(last.values()))
    except MegatronFtError as error:
        found.append(str(error))
    return found


def listed_problems() -> list[str]:
    """Return the flags of the recorded list that are refused. The list is beside the repository, and may be missing."""
    if not LISTED.exists():
        return []
    lines = [shlex.split(line) for line in LISTED.read_text(encoding="utf-8").splitlines() if line.strip()]
    answers = [answer for words in lines for answer in translate(words).answers]
    return [f"{LISTED.name}: {answer.sentence()}" for answer in answers if answer.kind == "refused"]


@functools.cache
def _types() -> dict[str, str]:
    return {doc.key: doc.type for doc in key_docs()}


def _words(flag: Flag) -> list[str]:
    if flag.takes == "nothing":
        return [f"--{flag.name}"]
    head, _, accepted = flag.answer.partition(" ")
    if flag.name in _SAMPLES:
        return [f"--{flag.name}", _SAMPLES[flag.name]]
    if accepted.startswith("in "):
        return [f"--{flag.name}", accepted.split()[1]]
    is_text = _types().get(head.removesuffix("=*"), "int").startswith("str")
    if flag.name == "rampup-batch-size":  # first batch, increment, samples
        return [f"--{flag.name}", "2", "2", "4"]
    return [f"--{flag.name}", "word" if is_text else "2"]


def _dry_run(translation: Translation) -> list[str]:
    """Return the error of the dry run, if it fails."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = pretrain_moe.main([*translation.overrides, "training.device=cuda", "dry_run=true"])
    return [] if code == 0 else [f"exit code {code}: {err.getvalue().strip()}"]


def _write_inputs(folder: Path) -> None:
    """Write a dataset and a tokenizer of 256 entries."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"t{index}": index for index in range(256)}, "t0")).save(str(folder / "tokenizer.json"))
    with IndexedWriter(folder / "text_document", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(1_000_000) % 250)


if __name__ == "__main__":
    sys.exit(main())
