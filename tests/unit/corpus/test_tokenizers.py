"""Tests tokenizers, and which of their files are refused."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config.job import DataConfig, JobConfig
from megatron_ft.config.validate import validate
from megatron_ft.corpus.samples import check_data
from megatron_ft.corpus.tokenizers import ByteTokenizer, build_tokenizer, byte_letters, losses
from megatron_ft.errors import ConfigError, DataError
from tools import preprocess_data

SHARED = Path(__file__).parents[4] / "shared" / "data"
GPT2 = SHARED / "tokenizer" / "gpt2"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason=f"{GPT2} is missing")
needs_bpe = pytest.mark.skipif(not (SHARED / "tokenizer/bpe_2k.json").is_file(), reason="bpe_2k.json is missing")


def small_gpt2(folder: Path, *, drop: str | None = None, merges: str = "#version: 0.2\nh e\nhe y\n") -> DataConfig:
    """Write a byte-level vocabulary with two merges to ``folder``."""
    entries = [*byte_letters(), "he", "hey", "<|endoftext|>"]
    vocabulary = {entry: number for number, entry in enumerate(entries) if entry != drop}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return DataConfig(tokenizer="gpt2", vocab_file=str(folder / "vocab.json"), merges_file=str(folder / "merges.txt"))


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(np.append(tokens.astype(np.int64), tokenizer.eod)) == text


@needs_gpt2
def test_gpt2_vectors() -> None:
    tokenizer = build_tokenizer(
        DataConfig(tokenizer="gpt2", vocab_file=str(GPT2 / "vocab.json"), merges_file=str(GPT2 / "merges.txt"))
    )
    vectors = json.loads((GPT2 / "encode_vectors.json").read_text(encoding="utf-8"))["vectors"]
    assert len(vectors) >= 6
    for vector in vectors:
        assert tokenizer.encode(vector["text"]).tolist() == vector["ids"], vector["text"]
        assert tokenizer.decode(np.asarray(vector["ids"], dtype=np.int64)) == vector["text"]
    assert (tokenizer.vocab_size, tokenizer.eod, losses(tokenizer)) == (50257, 50256, "")
    assert tokenizer.eod not in tokenizer.encode("a <|endoftext|> in the text")


@needs_bpe
def test_huggingface_on_real_text_and_what_its_vocabulary_loses() -> None:
    path = SHARED / "tokenizer" / "bpe_2k.json"
    tokenizer = build_tokenizer(DataConfig(tokenizer="huggingface", tokenizer_file=str(path)))
    text = (SHARED / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:20_000]
    tokens = tokenizer.encode(text)
    assert tokens.max() < tokenizer.vocab_size and tokenizer.eod < tokenizer.vocab_size
    assert set(tokenizer.dropped) == set(" \t\n\r\v\f")
    assert tokenizer.decode(tokens) == "".join(text.split())
    assert "does not know these characters" in losses(tokenizer)
    assert [part.tolist() for part in tokenizer.encode_many([text, "x"])] == [
        tokens.tolist(),
        tokenizer.encode("x").tolist(),
    ]


def test_small_gpt2_merges(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(small_gpt2(tmp_path))
    assert tokenizer.encode("hey he").tolist() == [257, byte_letters().index("Ġ"), 256]
    assert (tokenizer.vocab_size, tokenizer.eod) == (259, 258)


def test_no_known_eod_adds_one(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(small_gpt2(tmp_path, drop="<|endoftext|>"))
    assert (tokenizer.vocab_size, tokenizer.eod) == (259, 258)
    assert tokenizer.decode(np.asarray([256, 258])) == "he"


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("hey", "no entry 'hey', which merge .* in .*merges.txt line 3"),
        ("h", "no entry 'h', which represents byte 104"),
    ],
)
def test_vocabulary_without_a_needed_entry(tmp_path: Path, drop: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer(small_gpt2(tmp_path, drop=drop))


@pytest.mark.parametrize(
    ("merges", "message"),
    [("", "is empty"), ("#version: 0.2\n", "contains no merges"), ("h e\nhe\n", "line 2: 'he': must be two entries")],
)
def test_bad_merges(tmp_path: Path, merges: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_tokenizer(small_gpt2(tmp_path, merges=merges))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 0, ', "damaged JSON.*line 1"),
        (b"", "is empty"),
        (b"[1]", "must contain a JSON object, not list"),
        (b'{"a": -1}', "id of entry 'a' is -1"),
        (b'{"a": "0"}', "id of entry 'a' is '0'"),
        (b'{"a": 0, "b": 0}', "id 0: must belong to one entry"),
        (b'{"a": "\xff"}', "must be UTF-8"),
        (b"{}", "at least one"),
    ],
)
def test_bad_vocabulary(tmp_path: Path, content: bytes, message: str) -> None:
    config = small_gpt2(tmp_path)
    (tmp_path / "vocab.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        build_tokenizer(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}},
            r"no entry 'ab', which model.merges\[0\]",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}, r"no entry 'ab'"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}}, r"model.merges\[0\]='a': must be two"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": 3}}, "model.merges=3: must be a list"),
        ({"model": {"type": "Nonsense"}}, "refused by the tokenizers library"),
        ({"version": "1.0"}, "model=NoneType"),
    ],
)
def test_bad_tokenizer_json(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        build_tokenizer(DataConfig(tokenizer="huggingface", tokenizer_file=str(path)))


def test_a_pattern_that_makes_the_library_panic_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """A panic of a library in Rust is not an ``Exception``, so it would end the process without a message about the
    file."""
    path = tmp_path / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    path.write_text(json.dumps({"version": "1.0", "pre_tokenizer": split, "model": model}), encoding="utf-8")
    tokenizer = build_tokenizer(DataConfig(tokenizer="huggingface", tokenizer_file=str(path)))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_many([text])):
        with pytest.raises(DataError, match=f"{path}: refused by the tokenizers library: PanicException"):
            encode("a" * 40 + "b")


def test_truncation_in_the_file_does_not_cut_documents(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    model = {"type": "BPE", "vocab": {"a": 0, "</s>": 1}, "merges": []}
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps({"version": "1.0", "truncation": truncation, "model": model}), encoding="utf-8")
    tokenizer = build_tokenizer(DataConfig(tokenizer="huggingface", tokenizer_file=str(path)))
    assert tokenizer.encode("aaaaa").size == 5
    assert tokenizer.eod == 1


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (DataConfig(tokenizer="wordpiece"), ConfigError, "data.tokenizer=wordpiece: must be bytes"),
        (DataConfig(tokenizer="sentencepiece"), ConfigError, "data.tokenizer_file=None"),
        (DataConfig(tokenizer="gpt2"), ConfigError, "data.vocab_file=None"),
        (DataConfig(tokenizer="huggingface", tokenizer_file="/nope.json"), DataError, "data.tokenizer_file=/nope.json"),
    ],
)
def test_config_errors(config: DataConfig, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_tokenizer(config)


TEXT = ["The quick brown fox jumps over the lazy dog.", "Pack my box with five dozen liquor jugs!", "été 12 + 34 = 46"]


def sentencepiece_model(folder: Path, **options: object) -> DataConfig:
    """Train a model with 300 pieces on a few sentences."""
    library = pytest.importorskip("sentencepiece")
    settings = {"vocab_size": 300, "model_type": "bpe", "byte_fallback": True, "num_threads": 1, "minloglevel": 2}
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 50), model_prefix=str(folder / "small"), **(settings | options)
    )
    return DataConfig(tokenizer="sentencepiece", tokenizer_file=str(folder / "small.model"))


def test_sentencepiece_encodes_as_the_library_does(tmp_path: Path) -> None:
    config = sentencepiece_model(tmp_path)
    tokenizer = build_tokenizer(config)
    library = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=config.tokenizer_file)
    for text, tokens in zip(TEXT, tokenizer.encode_many(TEXT), strict=True):
        assert tokens.tolist() == library.encode(text) == tokenizer.encode(text).tolist()
        assert tokens.dtype == np.int64 and tokens.max() < tokenizer.vocab_size == 300
        assert tokenizer.decode(np.append(tokens, tokenizer.eod)) == text
    assert tokenizer.eod == library.eos_id() == 2
    assert tokenizer.eod not in tokenizer.encode("a </s> in the text")
    assert set(tokenizer.dropped) <= set(" \t\n\r\v\f") and "\n" in tokenizer.dropped
    other = tmp_path / "other"
    other.mkdir()
    assert build_tokenizer(sentencepiece_model(other, vocab_size=310)).fingerprint != tokenizer.fingerprint


def test_sentencepiece_without_an_end_gets_one_and_names_what_it_loses(tmp_path: Path) -> None:
    options = {"vocab_size": 80, "model_type": "char", "byte_fallback": False, "hard_vocab_limit": False}
    tokenizer = build_tokenizer(sentencepiece_model(tmp_path, eos_id=-1, **options))
    assert tokenizer.eod == tokenizer.vocab_size - 1
    assert set("Z#~") <= set(tokenizer.dropped) and "q" not in tokenizer.dropped
    assert "drops them" in losses(tokenizer)


def test_a_file_that_is_no_sentencepiece_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    path = tmp_path / "broken.model"
    path.write_bytes(b"no model" * 10)
    with pytest.raises(DataError, match=f"{path}: refused by the sentencepiece library"):
        build_tokenizer(DataConfig(tokenizer="sentencepiece", tokenizer_file=str(path)))


def test_sentencepiece_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.model"
    path.write_bytes(b"x")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else find(name))
    with pytest.raises(ConfigError, match="needs the package sentencepiece, which is not installed"):
        build_tokenizer(DataConfig(tokenizer="sentencepiece", tokenizer_file=str(path)))


def test_a_dataset_of_sentencepiece_tokens_can_be_trained_on(tmp_path: Path) -> None:
    config = sentencepiece_model(tmp_path)
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 200), encoding="utf-8")
    arguments = ["--input", str(tmp_path / "text.txt"), "--output-prefix", str(tmp_path / "set"), "--workers", "1"]
    arguments += ["--tokenizer", "sentencepiece", "--tokenizer-file", str(config.tokenizer_file)]
    assert preprocess_data.main(arguments) == 0
    job = JobConfig()
    job.data = dataclasses.replace(config, train=[str(tmp_path / "set")])
    validate(job)
    summary = check_data(job)
    assert (summary.tokenizer_vocab_size, summary.vocab_size, summary.eod) == (300, 384, 2)
    job.data.tokenizer, job.data.tokenizer_file = "bytes", None
    with pytest.raises(DataError, match="tokenizer"):
        check_data(job)
