"""Checks of the keys of ``data``. ``megatron_ft.corpus.samples`` checks the files that these keys name."""

from megatron_ft.config.checks.parallel import require_local_layers
from megatron_ft.config.checks.primitives import one_of, require
from megatron_ft.config.job import DataConfig, JobConfig

LARGEST_SEED = 2**31 - 1


def check_data_knobs(data: DataConfig) -> None:
    """Check sources, their weights, seed and tokenizer. The chosen tokenizer's files, and no others, must be given."""
    one_of(("bytes", "huggingface", "gpt2", "sentencepiece"), "data.tokenizer", data.tokenizer)
    require(bool(data.train), "data.train", data.train, "must name at least one source")
    for split in ("train", "valid"):
        _check_sources(split, getattr(data, split), getattr(data, f"{split}_weights"))
    require(0 <= data.valid_fraction < 1, "data.valid_fraction", data.valid_fraction, "must be in [0, 1)")
    require(0 <= data.seed <= LARGEST_SEED, "data.seed", data.seed, f"must be in 0..{LARGEST_SEED}")
    require(bool(data.cache_dir.strip()), "data.cache_dir", repr(data.cache_dir), "must name a folder")
    _check_tokenizer_files(data)


def check_documents(config: JobConfig) -> None:
    """Check that the model supports ``data.reset_position_ids`` and ``data.reset_attention_mask`` if they are true."""
    embedding = config.model.position_embedding_type
    require(
        not config.data.reset_position_ids or (embedding != "rope" and not config.model.multi_latent_attention),
        "data.reset_position_ids",
        True,
        "must be false with rotary positions (model.position_embedding_type=rope or "
        "model.multi_latent_attention=true): attention depends only on the distances between tokens of a document, and "
        "a reset does not change these; set data.reset_attention_mask=true to separate documents",
    )
    if not config.data.reset_attention_mask:
        return
    reason = "the fused attention of Transformer Engine supports only causal masks"
    require_local_layers(config, "data.reset_attention_mask=true", "local or auto", reason)


def _check_sources(split: str, sources: list[str], weights: list[float] | None) -> None:
    key = f"data.{split}_weights"
    require(all(source.strip() for source in sources), f"data.{split}", sources, "must not contain an empty path")
    if weights is None:
        return
    require(
        len(weights) == len(sources),
        key,
        weights,
        f"must have as many weights as data.{split} has sources, {len(sources)}",
    )
    require(all(weight > 0 for weight in weights), key, weights, "must contain only weights greater than 0")


def _check_tokenizer_files(data: DataConfig) -> None:
    files = {"bytes": (), "gpt2": ("vocab_file", "merges_file")}
    needed = files.get(data.tokenizer, ("tokenizer_file",))
    missing = [name for name in needed if not getattr(data, name)]
    for name in missing[:1]:
        also = "".join(f", and so must data.{other}" for other in missing[1:])
        constraint = f"must be given with data.tokenizer={data.tokenizer}{also}"
        require(False, f"data.{name}", getattr(data, name), constraint)
    for name in ("tokenizer_file", "vocab_file", "merges_file"):
        value, constraint = getattr(data, name), f"must be null with data.tokenizer={data.tokenizer}"
        require(name in needed or value is None, f"data.{name}", value, constraint)
