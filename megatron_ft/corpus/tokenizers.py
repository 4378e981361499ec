"""Tokenizers: bytes (built in), a JSON file of the ``tokenizers`` library, GPT-2's vocab.json and merges.txt, or a
``.model`` file of SentencePiece.

The libraries ``tokenizers`` and ``sentencepiece`` are imported only for tokenizers that need them.
"""

import hashlib
import importlib.util
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_ft.config.job import DataConfig
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.serde import parse_json, read_bytes, reading

MAX_BYTES = 1 << 30
"""Largest size of a vocabulary file in bytes."""


def _read_text(path: Path) -> str:
    """Read a UTF-8 file. Raise a DataError if the file is missing, unreadable, empty or not UTF-8."""
    try:
        text = read_bytes(path, max_bytes=MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start}: must be UTF-8") from error
    if not text.strip():
        raise DataError(f"{path}: is empty")
    return text


def _read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object. Raise a DataError for other content."""
    try:
        content = parse_json(_read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: damaged JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: must contain a JSON object, not {type(content).__name__}")
    return content


def _check_vocabulary(path: Path, vocabulary: object) -> dict[str, int]:
    """Return ``vocabulary``. Raise a DataError unless it maps entries to distinct integers of at least 0."""
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise DataError(f"{path}: the vocabulary must be a JSON object that maps at least one entry to an id")
    owner: dict[int, str] = {}
    for entry, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < 1 << 31:
            raise DataError(f"{path}: id of entry {entry!r} is {number!r}: must be an integer from 0 to 2^31 - 1")
        # Decoding an id of two entries would be ambiguous.
        if number in owner:
            raise DataError(f"{path}: id {number}: must belong to one entry, not to {owner[number]!r} and {entry!r}")
        owner[number] = entry
    return vocabulary


def _check_merges(vocab_path: Path, vocabulary: dict[str, int], merges: Iterable[tuple[str, str, str]]) -> None:
    """Raise a DataError if the vocabulary lacks one of a merge's entries: left, right, or both joined to one."""
    for place, left, right in merges:
        for entry in (left, right, left + right):
            if entry not in vocabulary:
                raise DataError(f"{vocab_path}: has no entry {entry!r}, which merge {left} {right} in {place} needs")


def _read_merges(path: Path) -> list[tuple[str, str, str]]:
    """Read a ``merges.txt`` of BPE. Return (file line, left entry, right entry) for each merge."""
    merges = []
    # ``splitlines`` would also cut at characters that entries may contain, such as U+2028.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2 or not all(parts):
            raise DataError(f"{path}: line {number}: {line[:60]!r}: must be two entries separated by one space")
        merges.append((f"{path} line {number}", parts[0], parts[1]))
    if not merges:
        raise DataError(f"{path}: contains no merges (pairs of entries)")
    return merges


def byte_letters() -> list[str]:
    """Return the letter by which byte-level BPE (GPT-2) represents each of the 256 bytes. Printable Latin-1 characters
    represent themselves. Bytes without a printable character are represented by characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _check_byte_letters(path: Path, vocabulary: dict[str, int]) -> None:
    """Raise a DataError if a byte-level BPE's vocabulary lacks a byte. The tokenizer would drop this byte."""
    for byte, letter in enumerate(byte_letters()):
        if letter not in vocabulary:
            raise DataError(f"{path}: has no entry {letter!r}, which represents byte {byte}")


END_OF_DOCUMENT_ENTRIES = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|end▁of▁sentence|>", "[EOS]")
"""Names that vocabularies use for the end-of-document token. The first of these names in a vocabulary is used."""

_REFUSED = "refused by the tokenizers library"


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one, including ``eod``."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token; ``encode`` never returns it."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digest of everything that affects the encoding."""

    @property
    def dropped(self) -> str:
        """Printable ASCII characters that ``encode`` drops, because the vocabulary has no token for them."""

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids ``[num_tokens]`` of a text, without ``eod``."""

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the result of ``encode`` for each text, in order. An implementation may use threads."""

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of the token ids ``[num_tokens]``. ``eod`` is left out; invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of UTF-8. Token 256 ends a document."""

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


class _LibraryTokenizer:
    """A tokenizer of the ``tokenizers`` library. It never truncates, and treats special tokens in a text as plain text.

    If the vocabulary has no known end-of-document token, an end-of-document token is added with the next id.

    Raises:
        DataError: the library fails when the tokenizer is built or encodes a text. The message names ``source``.
    """

    def __init__(self, backend: Any, vocabulary: dict[str, int], fingerprint: str, source: Path) -> None:
        self._source = source
        # The tokenizer's file may switch on padding and truncation, which would add or remove tokens without an error.
        backend.no_padding()
        backend.no_truncation()
        # Special tokens in a text are treated as plain text, so that a text cannot contain the end-of-document token.
        backend.encode_special_tokens = True
        self._backend = backend
        size = max(vocabulary.values()) + 1
        known = [vocabulary[entry] for entry in END_OF_DOCUMENT_ENTRIES if entry in vocabulary]
        self.eod = known[0] if known else size
        self.vocab_size = max(size, self.eod + 1)
        self.fingerprint = fingerprint
        # Tokenizers without byte fallback drop unknown characters without an error.
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


class _SentencePieceTokenizer:
    """A tokenizer in a ``.model`` file of SentencePiece. It adds no special tokens. Control symbols such as ``</s>``
    in a text are plain text, so a text cannot contain the end-of-document token.

    The end-of-document token is the model's end-of-sequence symbol, as in ``GPTSentencePieceTokenizer`` of Megatron-LM.
    If the model has no such symbol, an end-of-document token is added with the next id.

    Raises:
        DataError: the file is no model of SentencePiece. The message names ``path``.
    """

    def __init__(self, path: Path) -> None:
        import sentencepiece

        content = read_bytes(path, max_bytes=MAX_BYTES)
        with reading(path, what="refused by the sentencepiece library"):
            self._backend: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        size = int(self._backend.get_piece_size())
        eos = int(self._backend.eos_id())
        self.eod = eos if eos >= 0 else size
        self.vocab_size = max(size, self.eod + 1)
        self.fingerprint = _digest(path)
        # Dropped characters become the unknown token, from which they cannot be decoded, or are removed as white space.
        unknown = int(self._backend.unk_id())
        encoded = {letter: self.encode(letter).tolist() for letter in string.printable}
        self.dropped = "".join(letter for letter, ids in encoded.items() if not ids or unknown in ids)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._backend.encode(list(texts), out_type=int, add_bos=False, add_eos=False)
        return [np.asarray(ids, dtype=np.int64) for ids in found]

    def decode(self, ids: np.ndarray) -> str:
        return str(self._backend.decode([int(number) for number in ids if number != self.eod]))


def losses(tokenizer: Tokenizer) -> str:
    """Return a warning about characters that ``tokenizer`` drops, or an empty text."""
    if not tokenizer.dropped:
        return ""
    return f"the tokenizer does not know these characters and drops them: {tokenizer.dropped!r}"


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """Create the tokenizer that ``config`` names.

    Raises:
        ConfigError: the tokenizer is unknown, the configuration lacks the path of a file, or a package is missing.
        DataError: a file is missing or damaged, or a BPE merge needs an entry that the vocabulary does not have.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer == "huggingface":
        return _huggingface(_needed("data.tokenizer_file", config.tokenizer_file, config.tokenizer))
    if config.tokenizer == "gpt2":
        vocab_file = _needed("data.vocab_file", config.vocab_file, config.tokenizer)
        return _gpt2(vocab_file, _needed("data.merges_file", config.merges_file, config.tokenizer))
    if config.tokenizer == "sentencepiece":
        path = _needed("data.tokenizer_file", config.tokenizer_file, config.tokenizer)
        if importlib.util.find_spec("sentencepiece") is None:
            raise ConfigError(
                "data.tokenizer=sentencepiece: needs the package sentencepiece, which is not installed. Install it "
                "with 'pip install -c requirements/constraints.txt sentencepiece', or convert the file to Hugging "
                "Face's tokenizer.json and set data.tokenizer=huggingface"
            )
        return _SentencePieceTokenizer(path)
    raise ConfigError.of("data.tokenizer", config.tokenizer, "must be bytes, huggingface, gpt2 or sentencepiece")


def _needed(key: str, value: str | None, tokenizer: str) -> Path:
    if value is None:
        raise ConfigError.of(key, None, f"must name a file for data.tokenizer={tokenizer}")
    if not Path(value).is_file():
        raise DataError.of(key, value, "must be an existing file")
    return Path(value)


def _gpt2(vocab_file: Path, merges_file: Path) -> Tokenizer:
    vocabulary = _check_vocabulary(vocab_file, _read_json_object(vocab_file))
    merges = _read_merges(merges_file)
    _check_byte_letters(vocab_file, vocabulary)
    _check_merges(vocab_file, vocabulary, merges)
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.BPE(vocab=vocabulary, merges=[(left, right) for _, left, right in merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _LibraryTokenizer(backend, vocabulary, _digest(vocab_file, merges_file), vocab_file)


def _huggingface(path: Path) -> Tokenizer:
    content = _read_json_object(path)
    model = content.get("model")
    if not isinstance(model, dict):
        raise DataError(f"{path}: model={type(model).__name__}: must be an object, as the tokenizers library writes it")
    # Checked here, because the library's own error names neither the entry nor the merge.
    if model.get("type", "BPE") == "BPE" and "merges" in model:
        _check_json_merges(path, model)
    import tokenizers

    with reading(path, what=_REFUSED):
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    return _LibraryTokenizer(backend, _checked(path, backend.get_vocab(with_added_tokens=True)), _digest(path), path)


def _checked(path: Path, vocabulary: dict[str, int]) -> dict[str, int]:
    if not vocabulary:
        raise DataError(f"{path}: vocabulary: must have at least one entry")
    return vocabulary


def _check_json_merges(path: Path, model: dict[str, Any]) -> None:
    vocabulary = _check_vocabulary(path, model.get("vocab"))
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
