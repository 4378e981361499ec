"""Tokenizers: bytes (built in), a Hugging Face ``tokenizers`` JSON file, GPT-2's vocab.json and merges.txt.

The ``tokenizers`` library is imported only where one of the latter two is built.
"""

import hashlib
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_ft.config.data import DataConfig
from megatron_ft.corpus import vocabulary as files
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.reading import reading

END_OF_DOCUMENT_ENTRIES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|end▁of▁sentence|>", "[EOS]")
"""Published names of the end-of-document token, tried in this order."""

_REFUSED = "refused by the tokenizers library"


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Largest id plus one, ``eod`` included."""

    @property
    def eod(self) -> int:
        """Id that ends a document; no text encodes to it."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of everything that affects the encoding."""

    @property
    def dropped(self) -> str:
        """Printable ASCII characters that are not encoded at all and would be lost."""

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids ``[num_tokens]`` of a text, without ``eod``."""

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return ``encode`` of each text, in order; may use threads."""

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ``ids`` ``[num_tokens]``; ``eod`` is left out, broken UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """Every UTF-8 byte is a token; 256 ends a document."""

    vocab_size = 257
    eod = 256
    fingerprint = "bytes"
    dropped = ""

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        return np.asarray(ids)[np.asarray(ids) < self.eod].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class LibraryTokenizer:
    """A tokenizer of the ``tokenizers`` library, set to add no special tokens, truncate nothing and interpret none.

    A vocabulary without a known end-of-document entry gets one more id, its largest plus one.

    Raises:
        DataError: the library fails on the file's rules, when it is built or at any text; names ``source``.
    """

    def __init__(self, backend: Any, vocabulary: dict[str, int], fingerprint: str, source: Path) -> None:
        self._source = source
        # A file may switch on padding and truncation: text would change or get lost without an error.
        backend.no_padding()
        backend.no_truncation()
        # Special tokens in a text are plain text: otherwise a document could end itself.
        backend.encode_special_tokens = True
        self._backend = backend
        size = max(vocabulary.values()) + 1
        known = [vocabulary[entry] for entry in END_OF_DOCUMENT_ENTRIES if entry in vocabulary]
        self.eod = known[0] if known else size
        self.vocab_size = max(size, self.eod + 1)
        self.fingerprint = fingerprint
        # Tokenizers without byte fallback drop unknown characters silently.
        self.dropped = "".join(letter for letter in string.printable if not self.encode(letter).size)

    def encode(self, text: str) -> np.ndarray:
        with reading(self._source, what=_REFUSED):
            return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        with reading(self._source, what=_REFUSED):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        kept = [int(number) for number in ids if number != self.eod]
        with reading(self._source, what=_REFUSED):
            return str(self._backend.decode(kept, skip_special_tokens=False))


def losses(tokenizer: Tokenizer) -> str:
    """Describe the characters that ``tokenizer`` drops; empty where there are none."""
    if not tokenizer.dropped:
        return ""
    return f"the tokenizer has no entry for, and drops, {len(tokenizer.dropped)} characters: {tokenizer.dropped!r}"


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """Build the tokenizer that ``config`` names.

    Raises:
        ConfigError: an unknown name, or a file the tokenizer needs is not given.
        DataError: a file is missing or damaged, or its merges need an entry its vocabulary lacks.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer == "huggingface":
        return _huggingface(_needed("data.tokenizer_file", config.tokenizer_file, config.tokenizer))
    if config.tokenizer == "gpt2":
        vocab_file = _needed("data.vocab_file", config.vocab_file, config.tokenizer)
        return _gpt2(vocab_file, _needed("data.merges_file", config.merges_file, config.tokenizer))
    raise ConfigError.of("data.tokenizer", config.tokenizer, "must be bytes, huggingface or gpt2")


def _needed(key: str, value: str | None, tokenizer: str) -> Path:
    if value is None:
        raise ConfigError.of(key, None, f"must name a file for data.tokenizer={tokenizer}")
    if not Path(value).is_file():
        raise DataError.of(key, value, "must be an existing file")
    return Path(value)


def _gpt2(vocab_file: Path, merges_file: Path) -> Tokenizer:
    vocabulary = files.check_vocabulary(vocab_file, files.read_json_object(vocab_file))
    merges = files.read_merges(merges_file)
    files.check_byte_letters(vocab_file, vocabulary)
    files.check_merges(vocab_file, vocabulary, merges)
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.BPE(vocab=vocabulary, merges=[(left, right) for _, left, right in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return LibraryTokenizer(backend, vocabulary, _digest(vocab_file, merges_file), vocab_file)


def _huggingface(path: Path) -> Tokenizer:
    content = files.read_json_object(path)
    model = content.get("model")
    if not isinstance(model, dict):
        raise DataError(f"{path}: model={type(model).__name__}: must be an object, as the tokenizers library writes it")
    # Checked here, because the library's own error names neither the entry nor the merge.
    if model.get("type", "BPE") == "BPE" and "merges" in model:
        _check_json_merges(path, model)
    import tokenizers

    with reading(path, what=_REFUSED):
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    return LibraryTokenizer(backend, _checked(path, backend.get_vocab(with_added_tokens=True)), _digest(path), path)


def _checked(path: Path, vocabulary: dict[str, int]) -> dict[str, int]:
    if not vocabulary:
        raise DataError(f"{path}: vocabulary: must hold at least one entry")
    return vocabulary


def _check_json_merges(path: Path, model: dict[str, Any]) -> None:
    vocabulary = files.check_vocabulary(path, model.get("vocab"))
    cut = len(model.get("continuing_subword_prefix") or "")
    if not isinstance(model["merges"], list):
        raise DataError(f"{path}: model.merges={model['merges']!r:.60}: must be a list")
    for number, merge in enumerate(model["merges"]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise DataError(f"{path}: model.merges[{number}]={merge!r}: must be two entries")
        for entry in (pair[0], pair[1], pair[0] + pair[1][cut:]):
            if entry not in vocabulary:
                raise DataError(f"{path}: model.vocab has no entry {entry!r}, which model.merges[{number}] needs")


def _digest(*paths: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
