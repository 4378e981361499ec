"""Converts weights of dense checkpoints to Hugging Face folders, and weights of such folders to dense checkpoints.

Tensors that are equal in source and target are copied from file to file. Other tensors are in memory one at a time.
Values are not rounded unless another dtype is requested.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from megatron_ft.config.model import ModelConfig
from megatron_ft.errors import CheckpointError, ConfigError
from megatron_ft.formatting import unlike_tensors
from megatron_ft.mcore.convert import deepseek, mixtral, qwen_moe
from megatron_ft.mcore.convert.dense_files import DenseReader
from megatron_ft.mcore.convert.family import SAME, Family, Rule
from megatron_ft.mcore.convert.folder import CONFIG, DTYPES, Folder, FolderPlan, FolderWriter, PlannedFile, check_space
from megatron_ft.mcore.convert.resume import ConversionRecord, WrittenFile, continued
from megatron_ft.mcore.convert.streams import StoredValues, Values, VerifiedFiles, tensor_of
from megatron_ft.mcore.convert.weights import MOST_FILE_BYTES, Progress, continue_weights, weights_manifest
from megatron_ft.snapshot.storage.files import FileEntry, write_atomically
from megatron_ft.snapshot.storage.manifest import Manifest

_FAMILIES = (mixtral.FAMILY, qwen_moe.QWEN2, qwen_moe.QWEN3, deepseek.DEEPSEEK, deepseek.DEEPSEEK_2)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}
"""Maps ``model_type`` in ``config.json`` to the family of the model (table of conversion rules)."""
_IGNORED = ("_extra_state",)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json")
_TOKENIZER_FILES += ("vocab.json", "merges.txt", "added_tokens.json", "generation_config.json")


def family_named(name: str) -> Family:
    """Return the family whose ``model_type`` is ``name``. Raise ConfigError if there is no such family."""
    if name not in FAMILIES:
        raise ConfigError.of("--family", name, f"must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Plan of a conversion from a dense checkpoint to a Hugging Face folder."""

    family: Family
    model: ModelConfig
    rules: tuple[Rule, ...]
    """Conversion rules of all tensors, in the order in which the tensors are written."""
    plan: FolderPlan

    @classmethod
    def of(
        cls,
        reader: DenseReader,
        family: Family,
        *,
        dtype: torch.dtype | None = None,
        vocab_size: int | None = None,
        most_file_bytes: int = MOST_FILE_BYTES,
    ) -> "Export":
        """Plan the conversion.

        Args:
            dtype: dtype of the written tensors; None for the dtype of the checkpoint.
            vocab_size: number of rows of embedding and head to write; None for all rows, including padding.
            most_file_bytes: largest size of a file, unless one tensor is larger.

        Raises:
            CheckpointError: the model is not of the family, or the checkpoint has other tensors than the family.
            ConfigError: ``vocab_size`` or ``most_file_bytes`` is out of range.
        """
        model = reader.model()
        try:
            family.check(model)
        except CheckpointError as error:
            raise CheckpointError(f"{reader.directory}: {error}") from None
        rows = model.vocab_size or 0
        if vocab_size is not None and not 1 <= vocab_size <= rows:
            raise ConfigError.of("--vocab-size", vocab_size, f"must be from 1 to {rows}, the number of embedding rows")
        if most_file_bytes < 1:
            raise ConfigError.of("--file-bytes", most_file_bytes, "must be at least 1")
        rules = family.tensors_of(model, len(reader.weights), str(reader.directory))
        _check_tensors(reader, rules, model)
        written = model if vocab_size is None else replace(model, vocab_size=vocab_size)
        dtypes = {reader.weights[rule.ours].properties.dtype for rule in rules}
        if dtype is None and len(dtypes) > 1:
            raise ConfigError.of(
                "--dtype", None, f"must be given, because the checkpoint has tensors of {len(dtypes)} dtypes"
            )
        tensors = [
            (name, shape) for rule in rules for name, shape in zip(rule.theirs, rule.their_shapes(written), strict=True)
        ]
        plan = FolderPlan.of(tensors, dtype or dtypes.pop(), most_file_bytes)
        return cls(family=family, model=written, rules=rules, plan=plan)

    def tensors_of(self, file: PlannedFile, reader: DenseReader) -> Iterator[tuple[str, Values]]:
        """Yield (name, values) of each tensor that ``file`` will contain, in the order of the file. The values have the
        dtype of ``plan`` and the number of rows that ``file`` lists."""
        wanted = dict(file.tensors)
        for rule in self.rules:
            names = [name for name in rule.theirs if name in wanted]
            if not names:
                continue
            values = reader.values(rule.ours)
            if rule.layout is SAME and isinstance(values, StoredValues) and values.dtype == self.plan.dtype:
                yield names[0], values.first_rows(wanted[names[0]][0]) if values.shape else values
                continue
            parts = dict(zip(rule.theirs, rule.layout.split(tensor_of(values), self.model), strict=True))
            for name in names:
                rows = parts[name][: wanted[name][0]]  # without the padding of the vocabulary
                yield name, rows.to(self.plan.dtype)

    def config(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        return {
            "architectures": [self.family.architecture],
            "model_type": self.family.name,
            "torch_dtype": str(self.plan.dtype).removeprefix("torch."),
            **self.family.settings(self.model),
        }

    def summary(self) -> str:
        """Describe the conversion in one line."""
        return f"{self.family.name}: {self.plan.summary()}, {str(self.plan.dtype).removeprefix('torch.')}"


def _check_tensors(reader: DenseReader, rules: Sequence[Rule], model: ModelConfig) -> None:
    found = {name: entry for name, entry in reader.weights.items() if not name.endswith(_IGNORED)}
    wanted = {rule.ours: rule for rule in rules}
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{reader.directory}: its tensors do not fit the model family: {unlike_tensors(missing, unknown)}"
        )
    for name, rule in wanted.items():
        if tuple(found[name].size) != rule.shape(model):
            raise CheckpointError(
                f"{reader.directory}: {name} has the shape {tuple(found[name].size)}, but the model of its manifest "
                f"has {rule.shape(model)}"
            )
        if found[name].properties.dtype not in DTYPES.values():
            raise CheckpointError(
                f"{reader.directory}: {name} is {found[name].properties.dtype}: must be one of {', '.join(DTYPES)}"
            )


def export_checkpoint(
    reader: DenseReader, export: Export, out: Path, *, tokenizer: Path | None = None, progress: Progress = print
) -> None:
    """Write the folder ``out``. Verify and keep files that an interrupted conversion of the same checkpoint has
    completed.

    Args:
        tokenizer: folder whose tokenizer files are copied; None for no tokenizer.
        progress: receives one line for each file.

    Raises:
        CheckpointError: a tensor cannot be read, or a written file does not contain what was written.
        ConfigError: ``out`` contains other files, ``tokenizer`` has no tokenizer, or the disk has too little space.
        OSError: a file cannot be written.
    """
    source = {"family": export.family.name, "plan": asdict(export.plan) | {"dtype": str(export.plan.dtype)}}
    # Record only a checksum of the manifest: the folder may be published, and the manifest names the run and its data.
    source["source"] = "" if reader.manifest is None else xxhash.xxh3_128_hexdigest(reader.manifest.to_bytes())
    writer, copied = FolderWriter(path=out, plan=export.plan), _tokenizer_files(tokenizer)
    planned = {file.name: (number, file) for number, file in enumerate(export.plan.files, 1)}
    with continued(out, source, files=out, out=out) as record:
        left = [file for file in export.plan.files if file.name not in record.names()]
        check_space(out, sum(map(export.plan.bytes_of, left)))

        def note(name: str, what: str) -> None:
            progress(f"{planned[name][0]}/{len(planned)} {name}: {what}")

        def complete(entry: FileEntry) -> None:
            record.add(WrittenFile(entry=entry))
            file = planned[entry.name][1]
            note(entry.name, f"{len(file.tensors)} tensors, {export.plan.bytes_of(file):,} bytes")

        with VerifiedFiles(out, complete) as files:
            for file in export.plan.files:
                if file in left:
                    writer.write(file, export.tensors_of(file, reader), files)
                    continue
                files.wait()  # so that the lines are in the order of the files
                note(file.name, "complete already")
        for path in copied:
            write_atomically(out, path.name, path.read_bytes())
        writer.finish(export.config())
    # The checksums of all files have been compared already, so only names, shapes and dtypes are checked here.
    folder = Folder.open(out)
    _check_folder(folder, *model_of(folder))


def _tokenizer_files(folder: Path | None) -> list[Path]:
    if folder is None:
        return []
    found = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise ConfigError.of("--tokenizer", str(folder), f"must be a folder with one of {', '.join(_TOKENIZER_FILES)}")
    return found


def verify_folder(path: Path) -> Folder:
    """Compare names and shapes of the tensors in a folder with those of the model in ``config.json``. Read only the
    headers of the files. If this project wrote the folder, also compare the content of each file with its checksum.

    Raises:
        CheckpointError: a file is damaged or missing, or has other tensors than the model.
    """
    folder = Folder.open(path)
    family, model = model_of(folder)
    _check_folder(folder, family, model)
    if (record := ConversionRecord.read(path)) is not None:
        record.check(path)
    return folder


def model_of(folder: Folder) -> tuple[Family, ModelConfig]:
    """Return the family and the model in ``config.json``. Raise CheckpointError if the model is not supported."""
    name, where = folder.config.get("model_type"), str(folder.path / CONFIG)
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"{where}: model_type={name!r:.80}: must be one of {', '.join(FAMILIES)}")
    return FAMILIES[name], FAMILIES[name].read_model(folder.config, where)


def _check_folder(folder: Folder, family: Family, model: ModelConfig) -> None:
    wanted = {
        name: shape
        for rule in family.tensors_of(model, len(folder.tensors), str(folder.path))
        for name, shape in zip(rule.theirs, rule.their_shapes(model), strict=True)
    }
    missing, unknown = sorted(wanted.keys() - folder.tensors.keys()), sorted(folder.tensors.keys() - wanted.keys())
    # A tied head equals the embedding, but may be stored, too.
    if not model.untie_embeddings_and_output_weights:
        unknown = [name for name in unknown if name != "lm_head.weight"]
    if missing or unknown:
        raise CheckpointError(
            f"{folder.path}: its tensors do not fit the model in its {CONFIG}: missing tensors: {missing[:3]!r:.300}; "
            f"unexpected tensors: {unknown[:3]!r:.300} (at most 3 of each are shown)"
        )
    for name, shape in wanted.items():
        stored = folder.tensors[name]
        if stored.shape != shape or stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{folder.path / stored.file}: {name} has dtype {stored.dtype} and shape {list(stored.shape)}: must "
                f"have one of the dtypes {', '.join(DTYPES)}, and the shape {list(shape)}"
            )


def import_folder(
    path: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 128,
    most_file_bytes: int = MOST_FILE_BYTES,
    progress: Progress = print,
) -> Manifest:
    """Write a dense checkpoint ``out`` with the weights of a Hugging Face folder. The checkpoint has no optimizer state
    and no position in the data, so a run starts from it with ``checkpoint.load_weights``. Verify and keep files that an
    interrupted conversion of the same folder has completed.

    Args:
        dtype: dtype of the written weights; None for the dtype of the folder.
        vocab_multiple: embedding and head get rows of zeros, until the number of rows is a multiple of this number.
        most_file_bytes: a new file begins when a file has reached this size.
        progress: called with one line of text for every hundred tensors.

    Raises:
        CheckpointError: the folder is damaged, or its model is not supported.
        ConfigError: ``out`` exists, another conversion to it was interrupted or is running, or the disk has too little
            space.
        OSError: a file cannot be written.
    """
    folder = verify_folder(path)
    family, theirs = model_of(folder)
    model = replace(theirs, vocab_size=-(-(theirs.vocab_size or 0) // vocab_multiple) * vocab_multiple)
    rules = family.tensors(model)
    items = sum(prod(rule.shape(model)) for rule in rules)
    widths = [DTYPES[stored.dtype].itemsize for stored in folder.tensors.values()]
    keys = {f"model.{name}": value for name, value in asdict(model).items()}
    # The folder may have no checksums, so changed files are recognised by size and time.
    stored = [(name, (path / name).stat()) for name in sorted({tensor.file for tensor in folder.tensors.values()})]
    source = {
        "files": [[name, status.st_size, status.st_mtime_ns] for name, status in stored],
        "settings": {**keys, "family": family.name, "dtype": str(dtype), "most_file_bytes": most_file_bytes},
    }

    def left(complete: Collection[str]) -> Iterator[tuple[str, Values]]:
        if complete:
            progress(f"{len(complete)}/{len(rules)} tensors: complete already")
        return _imported(folder, [rule for rule in rules if rule.ours not in complete], model, dtype, progress)

    return continue_weights(
        out,
        left,
        weights_manifest(path.name or "weights", keys, {"family": family.name}),
        source=source,
        num_bytes=items * (max(widths) if dtype is None else dtype.itemsize),
        most_file_bytes=most_file_bytes,
    )


def _imported(
    folder: Folder, rules: Sequence[Rule], model: ModelConfig, dtype: torch.dtype | None, progress: Progress
) -> Iterator[tuple[str, Values]]:
    for number, rule in enumerate(rules, 1):
        yield rule.ours, _converted(folder, rule, model, dtype)
        if number % 100 == 0 or number == len(rules):
            progress(f"{number}/{len(rules)} tensors")


def _converted(folder: Folder, rule: Rule, model: ModelConfig, dtype: torch.dtype | None) -> Values:
    shape = rule.shape(model)
    if rule.layout is SAME:
        values = folder.values(rule.theirs[0])
        if values.shape == shape and dtype in (None, values.dtype):
            return values
    merged = rule.layout.merge([folder.read(name) for name in rule.theirs], model)
    if merged.shape[0] < shape[0]:
        merged = torch.cat([merged, merged.new_zeros(shape[0] - merged.shape[0], *shape[1:])])
    assert tuple(merged.shape) == shape, f"{rule.ours} has the shape {tuple(merged.shape)}, not {shape}"
    return merged if dtype is None else merged.to(dtype)
