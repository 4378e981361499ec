"""Tests that Megatron's own reader provides the samples, equal in every layout."""

import time
from pathlib import Path

import numpy as np
import pytest

from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.indexed import IndexedWriter
from megatron_ft.errors import DataError

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
samples = pytest.importorskip("megatron_ft.mcore.data.batches")

SEQ_LENGTH = 16


def dataset(prefix: Path, lengths: list[int], first: int = 0, dtype: str = "<u2") -> np.ndarray:
    """Write documents whose tokens count up from ``first``. Return all tokens."""
    stream = np.arange(first, first + sum(lengths))
    with IndexedWriter(prefix, np.dtype(dtype), overwrite=True) as writer:
        for part in np.split(stream, np.cumsum(lengths)[:-1]):
            writer.add_document(part)
    return stream


def job(*sources: Path, **data: object) -> JobConfig:
    config = JobConfig()
    config.model.seq_length, config.model.vocab_size = SEQ_LENGTH, 100_000
    config.data.train = [str(source) for source in sources]
    for key, value in data.items():
        setattr(config.data, key, value)
    return config


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8", "u1"])
def test_megatron_reads_what_was_written(tmp_path: Path, dtype: str) -> None:
    lengths = [3, 1, 40, 7]
    stream = dataset(tmp_path / "set", lengths, dtype=dtype)
    read = indexed_dataset.IndexedDataset(str(tmp_path / "set"))
    assert read.index.dtype == np.dtype(dtype)
    assert read.sequence_lengths.tolist() == lengths
    assert read.document_indices.tolist() == list(range(5))
    assert np.concatenate([read[position] for position in range(4)]).tolist() == stream.tolist()


def test_same_bytes_as_megatrons_own_builder(tmp_path: Path) -> None:
    lengths = [5, 2, 9]
    stream = dataset(tmp_path / "ours", lengths)
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for part in np.split(stream, np.cumsum(lengths)[:-1]):
        builder.add_document(part, [len(part)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


@pytest.mark.parametrize("mmap", [True, False])
def test_samples_are_windows_of_the_stream(tmp_path: Path, mmap: bool) -> None:
    stream = dataset(tmp_path / "set", [5, 11, 300, 1, 700], first=3)
    train = samples.open_samples(job(tmp_path / "set", mmap=mmap, valid_fraction=0.1), "train")
    num_tokens = stream.size - int(stream.size * 0.1)
    assert (train.num_tokens, train.num_samples) == (num_tokens, (num_tokens - 1) // SEQ_LENGTH)
    seen = []
    for index in range(2 * train.num_samples):
        tokens, place = train.sample(index), train.locate(index)
        assert tokens.dtype == np.int64 and tokens.flags.writeable
        start = place.sample * SEQ_LENGTH
        assert np.array_equal(tokens, stream[start : start + SEQ_LENGTH + 1])
        seen.append(place.sample)
    assert sorted(seen[: train.num_samples]) == sorted(seen[train.num_samples :]) == list(range(train.num_samples))
    assert seen[: train.num_samples] != seen[train.num_samples :]


def test_train_and_valid_are_disjoint(tmp_path: Path) -> None:
    dataset(tmp_path / "set", [1000])
    config = job(tmp_path / "set", valid_fraction=0.25)
    train, valid = (samples.open_samples(config, split) for split in ("train", "valid"))
    tokens = [
        {int(token) for index in range(split.num_samples) for token in split.sample(index)} for split in (train, valid)
    ]
    assert not tokens[0] & tokens[1]
    assert max(tokens[0]) < 750 <= min(tokens[1])


def test_a_blend_and_own_validation_sources(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 10_000), ("c", 20_000)):
        dataset(tmp_path / name, [2_000], first=first)
    config = job(tmp_path / "a", tmp_path / "b", train_weights=[3.0, 1.0], valid=[str(tmp_path / "c")])
    train, valid = (samples.open_samples(config, split) for split in ("train", "valid"))
    block = train.plan.order.block_samples
    from_b = sum(train.sample(index)[0] >= 10_000 for index in range(block))
    assert from_b == block // 4
    assert valid.sample(0)[0] >= 20_000
    assert train.num_tokens == 4_000


def test_reopened_samples_agree(tmp_path: Path) -> None:
    dataset(tmp_path / "set", [3_000])
    first, again = (samples.open_samples(job(tmp_path / "set"), "train") for _ in range(2))
    other = samples.open_samples(job(tmp_path / "set", seed=5), "train")
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    indices = [977, 3, 10**12, 0]
    assert [first.sample(i).tolist() for i in indices] == [again.sample(i).tolist() for i in indices[::-1]][::-1]


def test_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    dataset(tmp_path / "set", [1_000], dtype="<i4")
    config = job(tmp_path / "set")
    config.model.vocab_size = 500
    train = samples.open_samples(config, "train")
    with pytest.raises(
        DataError, match=r"data.train\[0\]=.*token [5-9]\d\d has the value [5-9].*must be from 0 to 499"
    ):
        for index in range(train.num_samples):
            train.sample(index)


def test_sample_is_quick(tmp_path: Path) -> None:
    for name in ("a", "b"):
        dataset(tmp_path / name, [60_000])
    train = samples.open_samples(job(tmp_path / "a", tmp_path / "b"), "train")
    best = min(_seconds_each(train) for _ in range(5))
    assert best < 100e-6


def _seconds_each(train: "samples.Samples") -> float:
    started = time.process_time()
    for index in range(200):
        train.sample(index)
    return (time.process_time() - started) / 200
