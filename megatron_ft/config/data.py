"""Training data and tokenizer (group ``data``)."""

from dataclasses import dataclass, field


@dataclass
class DataConfig:
    """Sources of tokens, and the tokenizer.

    A *source* is an indexed dataset, given as its path without ``.bin`` or ``.idx``, or ``python-stdlib``, a built-in
    corpus of the source code and docstrings of the running Python.
    """

    train: list[str] = field(default_factory=lambda: ["python-stdlib"])
    """Sources of training tokens."""
    train_weights: list[float] | None = None
    """Relative weights of the training sources; null weights sources by their numbers of tokens."""
    valid: list[str] = field(default_factory=list)
    """Sources of validation tokens. If empty, ``valid_fraction`` of each training source is used."""
    valid_weights: list[float] | None = None
    """Relative weights of the validation sources; null weights sources by their numbers of tokens."""
    valid_fraction: float = 0.02
    """Share of each training source, at its end, that is used only for validation if ``valid`` is empty."""
    tokenizer: str = "bytes"
    """``bytes``, ``huggingface`` (``tokenizer_file``) or ``gpt2`` (``vocab_file`` and ``merges_file``)."""
    tokenizer_file: str | None = None
    """JSON file of the ``tokenizers`` library, for ``huggingface``."""
    vocab_file: str | None = None
    """Vocabulary file (vocab.json), for ``gpt2``."""
    merges_file: str | None = None
    """Merges file (merges.txt), for ``gpt2``."""
    cache_dir: str = ".cache/data"
    """Folder for the index of the built-in corpus, which is written when the corpus is first used."""
    seed: int = 1234
    """Seed for the order of samples."""
    mmap: bool = True
    """Map ``.bin`` files into memory instead of reading them."""
