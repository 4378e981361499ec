"""Training data and tokenizer (group ``data``)."""

from dataclasses import dataclass, field


@dataclass
class DataConfig:
    """Token sources and the tokenizer.

    A *source* is the path of an indexed dataset without its ``.bin``/``.idx`` suffix, or ``python-stdlib``, a built-in
    corpus of the source code and docstrings of the running Python.
    """

    train: list[str] = field(default_factory=lambda: ["python-stdlib"])
    """Training sources."""
    train_weights: list[float] | None = None
    """Relative weights of the training sources; null weights them by their numbers of tokens."""
    valid: list[str] = field(default_factory=list)
    """Validation sources; if empty, ``valid_fraction`` of the training sources is used."""
    valid_weights: list[float] | None = None
    """Relative weights of the validation sources."""
    valid_fraction: float = 0.02
    """Share at the end of each training source that is held out for validation if ``valid`` is empty."""
    tokenizer: str = "bytes"
    """``bytes``, ``huggingface`` (a ``tokenizers`` JSON file) or ``gpt2`` (vocab.json and merges.txt)."""
    tokenizer_file: str | None = None
    """JSON file for ``huggingface``."""
    vocab_file: str | None = None
    """Vocabulary for ``gpt2``."""
    merges_file: str | None = None
    """Merges for ``gpt2``."""
    cache_dir: str = ".cache/data"
    """Folder for the indexes of built-in corpora, which are made once."""
    seed: int = 1234
    """Seed of the order of samples."""
    mmap: bool = True
    """Memory-map the ``.bin`` file instead of reading it."""
