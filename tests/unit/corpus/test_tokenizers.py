"""Tests tokenizers, and which of their files are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.config.job import DataConfig
from megatron_ft.corpus.tokenizers import ByteTokenizer, build_tokenizer, byte_letters, losses
from megatron_ft.errors import ConfigError, DataError

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
    [("hey", "no entry 'hey', which .*merges.txt line 3"), ("h", "no entry 'h', which byte 104 needs")],
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
        (b'{"a": -1}', "id of entry 'a'=-1"),
        (b'{"a": "0"}', "id of entry 'a'='0'"),
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
        (DataConfig(tokenizer="sentencepiece"), ConfigError, "data.tokenizer=sentencepiece: must be bytes"),
        (DataConfig(tokenizer="gpt2"), ConfigError, "data.vocab_file=None"),
        (DataConfig(tokenizer="huggingface", tokenizer_file="/nope.json"), DataError, "data.tokenizer_file=/nope.json"),
    ],
)
def test_config_errors(config: DataConfig, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_tokenizer(config)
