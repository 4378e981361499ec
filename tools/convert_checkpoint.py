"""Convert checkpoints: to Hugging Face folders and back, to Megatron-LM, to weights, to MoE models, and from windows.

``to-hf`` writes a folder with safetensors files, an index and ``config.json`` from a checkpoint of any parallel layout.
Four commands write a checkpoint with only weights, which ``checkpoint.load_weights`` loads: ``from-hf`` from a Hugging
Face folder, ``weights`` from a checkpoint, ``average`` as the mean of several checkpoints, and ``upcycle`` for an MoE
model from the weights of a dense model. ``to-megatron`` writes a folder that Megatron-LM loads. ``from-window`` starts
a job that replays a window of snapshots, and writes a dense checkpoint.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_ft.errors import EXIT_INTERRUPTED, ConfigError, MegatronFtError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return 0, or the exit code of an error."""
    arguments = _parse(argv)
    from megatron_ft.mcore.device.install import ignore_missing_packages

    ignore_missing_packages()
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        return int(arguments.run(arguments))
    except MegatronFtError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        continued = "to continue to-hf or from-hf, start the same command again"
        print(f"stopped before the result was complete; {continued}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:
        print(f"cannot write the result: {error}", file=sys.stderr)
        return 3
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    # SIGTERM has the effect of Ctrl-C: incomplete results are removed while the exception is handled.
    raise KeyboardInterrupt


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.convert_checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True)
    export = commands.add_parser("to-hf", help="write a Hugging Face folder")
    export.add_argument("checkpoint", type=Path, help="checkpoint directory, e.g. runs/NAME/checkpoints/iter_0000100")
    export.add_argument("out", type=Path, help="folder to write; an interrupted conversion is continued")
    export.add_argument(
        "--family",
        default="null",  # not a required argument: the error about a wrong family lists all of them
        help="model_type of the folder: mixtral, qwen2_moe, qwen3_moe, deepseek or deepseek_v2",
    )
    export.add_argument("--tokenizer", type=Path, help="folder with the tokenizer files that are copied")
    export.add_argument("--vocab-size", type=int, help="rows of embedding and head to write, without padding")
    export.add_argument("--trust", action="store_true", help="read a checkpoint without a manifest; it can run code")
    export.set_defaults(run=_export)
    importer = commands.add_parser("from-hf", help="write a checkpoint that contains only weights")
    importer.add_argument("folder", type=Path, help="Hugging Face folder")
    importer.add_argument(
        "out", type=Path, help="checkpoint directory to write; must not exist; an interrupted conversion is continued"
    )
    importer.add_argument(
        "--vocab-multiple", type=int, default=128, help="model.make_vocab_size_divisible_by of the run"
    )
    importer.set_defaults(run=_import)
    extractor = commands.add_parser("weights", help="write only the weights of a dense checkpoint")
    extractor.add_argument("checkpoint", type=Path, help="checkpoint directory")
    extractor.set_defaults(run=_extract)
    averager = commands.add_parser("average", help="write the mean of the weights of several dense checkpoints")
    averager.add_argument("checkpoints", type=Path, nargs="+", metavar="checkpoint", help="checkpoint directories")
    averager.set_defaults(run=_average)
    upcycler = commands.add_parser(
        "upcycle", help="write the weights of an MoE model, made from those of a dense model"
    )
    upcycler.add_argument("checkpoint", type=Path, help="checkpoint directory of a dense model")
    upcycler.add_argument("--experts", type=int, required=True, help="number of experts per layer: copies of the MLP")
    upcycler.add_argument("--topk", type=int, required=True, help="number of experts to which a token is routed")
    upcycler.add_argument(
        "--noise", type=float, default=0.0, help="standard deviation of noise added to experts; default: 0"
    )
    upcycler.add_argument("--seed", type=int, default=1234, help="seed of the noise and of the routers")
    upcycler.set_defaults(run=_upcycle)
    for command in (extractor, averager, upcycler):
        command.add_argument("out", type=Path, help="checkpoint directory to write; must not exist")
    averager.add_argument(
        "--weights", type=float, nargs="+", help="factor of each checkpoint, with the sum 1; default: all the same"
    )
    for command in (export, importer, extractor):
        command.add_argument(
            "--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the result; default: unchanged"
        )
    megatron = commands.add_parser("to-megatron", help="write a folder of checkpoints that Megatron-LM loads")
    megatron.add_argument("checkpoint", type=Path, help="checkpoint directory")
    megatron.add_argument("out", type=Path, help="folder to write; must not exist")
    megatron.set_defaults(run=_to_megatron)
    replayer = commands.add_parser("from-window", help="write a dense checkpoint from a window of snapshots on storage")
    replayer.add_argument("run_dir", type=Path, metavar="run", help="folder of the run, which is not changed")
    replayer.add_argument("out", type=Path, help="checkpoint directory to write; must not exist")
    replayer.add_argument("--window", help="name of the window, e.g. window_0000990; default: the newest valid one")
    replayer.set_defaults(run=_from_window)
    for command in (export, importer, extractor, averager, upcycler):
        command.add_argument("--file-bytes", type=int, default=5_000_000_000, help="largest size of a file")
    return parser.parse_args(argv)


def _export(arguments: argparse.Namespace) -> int:
    from megatron_ft.mcore.convert.converter import Export, export_checkpoint, family_named
    from megatron_ft.mcore.convert.dense_files import DenseReader

    family = family_named(arguments.family)
    reader = DenseReader.open(arguments.checkpoint, trust=arguments.trust)
    export = Export.of(
        reader,
        family,
        dtype=_dtype(arguments.dtype),
        vocab_size=arguments.vocab_size,
        most_file_bytes=arguments.file_bytes,
    )
    print(export.summary(), flush=True)
    with _progress() as progress:
        export_checkpoint(reader, export, arguments.out, tokenizer=arguments.tokenizer, progress=progress)
    print(f"{arguments.out}: complete and verified")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from megatron_ft.mcore.convert.converter import import_folder

    _at_least_1("--vocab-multiple", arguments.vocab_multiple)
    _at_least_1("--file-bytes", arguments.file_bytes)
    with _progress() as progress:
        manifest = import_folder(
            arguments.folder,
            arguments.out,
            dtype=_dtype(arguments.dtype),
            vocab_multiple=arguments.vocab_multiple,
            most_file_bytes=arguments.file_bytes,
            progress=progress,
        )
    return _show_weights(arguments.out, manifest)


def _extract(arguments: argparse.Namespace) -> int:
    from megatron_ft.mcore.convert.weights import extract_weights

    _at_least_1("--file-bytes", arguments.file_bytes)
    with _progress() as progress:
        manifest = extract_weights(
            arguments.checkpoint,
            arguments.out,
            dtype=_dtype(arguments.dtype),
            most_file_bytes=arguments.file_bytes,
            progress=progress,
        )
    return _show_weights(arguments.out, manifest)


def _average(arguments: argparse.Namespace) -> int:
    from megatron_ft.mcore.convert.weights import average_weights

    _at_least_1("--file-bytes", arguments.file_bytes)
    with _progress() as progress:
        manifest = average_weights(
            arguments.checkpoints,
            arguments.out,
            factors=arguments.weights,
            most_file_bytes=arguments.file_bytes,
            progress=progress,
        )
    return _show_weights(arguments.out, manifest)


def _to_megatron(arguments: argparse.Namespace) -> int:
    from megatron_ft.mcore.convert.megatron_folder import export_to_megatron

    exported = export_to_megatron(arguments.checkpoint, arguments.out, progress=_tell)
    print(f"{exported}: complete and verified; Megatron-LM loads it with --load {arguments.out}")
    return 0


def _upcycle(arguments: argparse.Namespace) -> int:
    from megatron_ft.mcore.convert.upcycle import Upcycling, upcycle_weights

    _at_least_1("--file-bytes", arguments.file_bytes)
    with _progress() as progress:
        manifest = upcycle_weights(
            arguments.checkpoint,
            arguments.out,
            Upcycling(num_experts=arguments.experts, topk=arguments.topk, noise=arguments.noise, seed=arguments.seed),
            most_file_bytes=arguments.file_bytes,
            progress=progress,
        )
    return _show_weights(arguments.out, manifest)


def _from_window(arguments: argparse.Namespace) -> int:
    import pretrain_moe
    from megatron_ft.mcore.convert.window_replay import replay_window

    manifest = replay_window(
        arguments.run_dir,
        arguments.out,
        name=arguments.window,
        compose=lambda words: pretrain_moe.compose(words)[0],
        entry=Path(pretrain_moe.__file__),
        progress=_tell,
    )
    print(f"{arguments.out}: complete and verified: {manifest.summary()}")
    print(f"start a run from it with checkpoint.load={arguments.out}")
    return 0


def _at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError.of(name, value, "must be at least 1")


def _show_weights(out: Path, manifest: Any) -> int:
    print(f"{out}: complete and verified; start a run with checkpoint.load_weights={out} and:")
    keys = {key: value for key, value in manifest.settings["model"].items() if key in SHOWN and value is not None}
    print(" ".join(f"{key}={_word(value)}" for key, value in keys.items()))
    return 0


SHOWN = tuple(
    f"model.{name}"
    for name in (
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size"),
        *("rotary_base", "layernorm_epsilon", "untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm"),
        *("ffn_hidden_size", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    )
)
"""Model keys whose values in a new checkpoint are printed, so that the user can copy them to the command of a run."""


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _dtype(name: str | None) -> Any:
    from megatron_ft.mcore.model.transformer_config import DTYPES

    return None if name is None else DTYPES[name]


def _tell(line: str) -> None:
    print(line, flush=True)


class Progress:
    """Prints lines of progress. A terminal shows all lines. Otherwise at most one line in ten seconds is printed, so
    that the log of a batch job stays short. At the end of its ``with`` block, it prints the last line."""

    SECONDS = 10.0

    def __init__(self, *, is_terminal: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_terminal, self._clock = is_terminal, clock
        self._next_seconds = -float("inf")
        self._left: str | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._left is not None:
            _tell(self._left)

    def __call__(self, line: str) -> None:
        """Print ``line`` at once to a terminal, or if no line was printed in the last 10 s. Otherwise keep the line and
        print it at the end of the ``with`` block unless a later line replaces it."""
        now = self._clock()
        if self._is_terminal or now >= self._next_seconds:
            self._next_seconds, self._left = now + self.SECONDS, None
            _tell(line)
        else:
            self._left = line


def _progress() -> Progress:
    return Progress(is_terminal=sys.stdout.isatty())


if __name__ == "__main__":
    sys.exit(main())
