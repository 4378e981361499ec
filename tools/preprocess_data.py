"""Converts text or JSONL to an indexed dataset (``PREFIX.bin``, ``PREFIX.idx``) for ``data.train``."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.config.job import DataConfig
from megatron_ft.corpus.documents import json_documents, text_documents
from megatron_ft.corpus.indexed import IndexedWriter, token_dtype
from megatron_ft.corpus.tokenizers import Tokenizer, build_tokenizer, losses
from megatron_ft.errors import MegatronFtError

BATCH_DOCUMENTS = 256
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(prog="preprocess_data", description=__doc__)
    result.add_argument(
        "--input", nargs="+", required=True, type=Path, metavar="FILE", help="UTF-8 text or JSONL files"
    )
    result.add_argument(
        "--output-prefix",
        required=True,
        type=Path,
        help="the tool writes PREFIX.bin, PREFIX.idx and PREFIX.tokenizer.json",
    )
    result.add_argument(
        "--format",
        choices=("auto", "text", "jsonl"),
        default="auto",
        help="format of the inputs; auto: JSONL if the suffix is .jsonl, .json or .ndjson, otherwise text",
    )
    result.add_argument(
        "--json-key", default="text", help="key of a JSONL line whose value is the text (default: text)"
    )
    result.add_argument(
        "--split-on-blank-lines", action="store_true", help="with text inputs: a blank line ends a document"
    )
    result.add_argument("--tokenizer", choices=("bytes", "huggingface", "gpt2", "sentencepiece"), default="bytes")
    result.add_argument("--tokenizer-file", help="tokenizer.json of huggingface, or .model of sentencepiece")
    result.add_argument("--vocab-file", help="vocab.json of gpt2")
    result.add_argument("--merges-file", help="merges.txt of gpt2")
    result.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="append the end-of-document token to each document",
    )
    result.add_argument(
        "--workers", type=int, default=None, help="number of threads for tokenization (default: one per core)"
    )
    result.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    return result


def documents(options: argparse.Namespace) -> Iterator[str]:
    """Yield the documents of all inputs, in order."""
    for path in options.input:
        if options.format == "jsonl" or (options.format == "auto" and path.suffix in JSON_SUFFIXES):
            yield from json_documents(path, options.json_key)
        else:
            yield from text_documents(path, split_on_blank_lines=options.split_on_blank_lines)


def write(writer: IndexedWriter, tokenizer: Tokenizer, texts: Iterator[str], *, append_eod: bool) -> int:
    """Tokenize and write all ``texts``. Return the number of empty texts, which are left out."""
    end = np.asarray([tokenizer.eod] if append_eod else [], dtype=np.int64)
    num_empty = 0
    while batch := list(islice(texts, BATCH_DOCUMENTS)):
        for tokens in tokenizer.encode_many(batch):
            if tokens.size:
                writer.add_document(np.concatenate((tokens, end)))
            else:
                num_empty += 1
    return num_empty


def run(options: argparse.Namespace) -> None:
    """Build the dataset as the command line requests, and print its size."""
    started = time.perf_counter()
    if options.workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    tokenizer = build_tokenizer(
        DataConfig(
            tokenizer=options.tokenizer,
            tokenizer_file=options.tokenizer_file,
            vocab_file=options.vocab_file,
            merges_file=options.merges_file,
        )
    )
    if warning := losses(tokenizer):
        print(f"preprocess_data: warning: {warning}", file=sys.stderr)
    dtype = token_dtype(tokenizer.vocab_size)
    with IndexedWriter(
        options.output_prefix, dtype, overwrite=options.overwrite, tokenizer=tokenizer.fingerprint
    ) as writer:
        num_empty = write(writer, tokenizer, documents(options), append_eod=options.append_eod)
    seconds = time.perf_counter() - started
    skipped = f", {num_empty:,} empty documents skipped" if num_empty else ""
    print(
        f"{options.output_prefix}: {writer.num_tokens:,} tokens ({dtype.name}) in {writer.num_documents:,} documents"
        f"{skipped}, vocabulary {tokenizer.vocab_size:,}, {seconds:.1f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parser().parse_args(arguments)
    if options.workers is not None and options.workers < 1:
        parser().error(f"--workers={options.workers}: must be at least 1")
    try:
        run(options)
    except MegatronFtError as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
