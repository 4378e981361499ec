"""Tests that all files that a job reads are checked before ranks start."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.indexed import IndexedWriter
from megatron_ft.corpus.samples import SplitPlan, check_data, resolve_vocab_size
from megatron_ft.corpus.tokenizers import ByteTokenizer
from megatron_ft.errors import ConfigError, DataError, MegatronFtError


def dataset(prefix: Path, num_tokens: int, *, last: int = 0) -> str:
    tokens = np.arange(num_tokens) % 200
    tokens[-1] = last
    with IndexedWriter(prefix, np.dtype("<u2"), overwrite=True) as writer:
        writer.add_document(tokens)
    return str(prefix)


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    result = JobConfig()
    result.model.seq_length = 32
    result.data.cache_dir = str(tmp_path / "cache")
    result.data.train = [dataset(tmp_path / "a", 10_000), dataset(tmp_path / "b", 5_000)]
    return result


def test_summary(config: JobConfig) -> None:
    summary = check_data(config)
    assert [(source.split, source.tokens, source.samples) for source in summary.sources] == [
        ("train", 9800, 306),
        ("train", 4900, 153),
        ("valid", 200, 6),
        ("valid", 100, 3),
    ]
    assert (summary.tokenizer_vocab_size, summary.vocab_size, summary.eod) == (257, 384, 256)

    assert "train: 9,800 tokens, 306 samples" in summary.summary()
    config.training.eval_interval_iterations = 0
    assert {source.split for source in check_data(config).sources} == {"train"}


def test_dry_run_writes_nothing_and_counts_all_the_same(config: JobConfig) -> None:
    config.data.train, config.dry_run = ["python-stdlib"], True
    planned = check_data(config)
    assert not Path(config.data.cache_dir).exists()
    assert "will be indexed" in planned.sources[0].checked
    config.dry_run = False
    done = check_data(config)
    assert "indexed in" in done.sources[0].checked
    assert planned.sources[0].tokens == pytest.approx(done.sources[0].tokens, rel=1e-3)


def test_train_and_valid_share_no_token_to_predict(config: JobConfig) -> None:
    train, valid = (SplitPlan.of(config.data, 32, split, ByteTokenizer()) for split in ("train", "valid"))
    for left, right in zip(train.spans, valid.spans, strict=True):
        assert left.first_token + left.num_tokens == right.first_token
        assert left.first_token + left.num_samples * 32 + 1 <= right.first_token
    assert valid.order.num_samples == (6, 3)


def test_vocab_size(config: JobConfig) -> None:
    assert resolve_vocab_size(config) == 384
    config.model.vocab_size, config.model.make_vocab_size_divisible_by = 1000, 7
    assert resolve_vocab_size(config) == 1001


def set_data(**changes: object) -> Callable[[JobConfig], None]:
    def change(config: JobConfig) -> None:
        for key, value in changes.items():
            assert hasattr(config.data, key)
            setattr(config.data, key, value)

    return change


def _foreign_ids(config: JobConfig) -> None:
    dataset(Path(config.data.train[0]), 300_000, last=257)


def _same_valid(config: JobConfig) -> None:
    config.data.valid = [config.data.train[1]]


def _twice(config: JobConfig) -> None:
    config.data.train = [config.data.train[0], os.path.relpath(config.data.train[0])]


def _short(config: JobConfig) -> None:
    config.model.seq_length = 10_000


def _short_valid(config: JobConfig) -> None:
    config.model.seq_length = 150


def _truncated_idx(config: JobConfig) -> None:
    os.truncate(f"{config.data.train[1]}.idx", 50)


def _small_vocab(config: JobConfig) -> None:
    config.model.vocab_size = 256


BAD = {
    "no source": (set_data(train=[]), ConfigError, r"data.train=\[\]: must name at least one"),
    "missing": (set_data(train=["nope"]), DataError, r"data.train\[0\]=nope: nope.idx: no such file"),
    "truncated": (_truncated_idx, DataError, r"data.train\[1\]=.*bytes=50: must be"),
    "short": (_short, DataError, r"data.train\[0\]=.*9800 of its 10000 tokens are for train: .*= 10001"),
    "short valid": (_short_valid, DataError, r"data.train\[1\]=.*100 of its 5000 tokens are for valid.*valid_fraction"),
    "weights": (set_data(train_weights=[1.0]), ConfigError, "data.train_weights"),
    "lone weights": (
        set_data(valid_weights=[1.0]),
        ConfigError,
        r"valid_weights=\[1.0\]: must be null without data.valid",
    ),
    "fraction": (set_data(valid_fraction=1.0), ConfigError, "data.valid_fraction=1.0"),
    "nothing held out": (set_data(valid_fraction=0.0), DataError, "0 of its 10000 tokens are for valid"),
    "overlap": (_same_valid, ConfigError, "must not contain"),
    "twice": (_twice, ConfigError, r"data.train\[1\]=.*named twice"),
    "ids": (_foreign_ids, DataError, "id of token 299999 is 257: must be from 0 to 256"),
    "vocab": (_small_vocab, ConfigError, "model.vocab_size=256: must be at least 257"),
    "tokenizer": (set_data(tokenizer="words"), ConfigError, "data.tokenizer=words"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(config: JobConfig, name: str) -> None:
    change, error, message = BAD[name]
    change(config)
    with pytest.raises(MegatronFtError, match=message) as caught:
        check_data(config)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_no_torch_and_no_tokenizers_are_imported() -> None:
    code = "import sys, megatron_ft.corpus.samples; print({'torch', 'megatron', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
