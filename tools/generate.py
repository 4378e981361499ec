"""Continues a text with the weights of a checkpoint, to see what a model has learned.

The checkpoint may have been saved in any layout. It is loaded in one process, on the CPU by default.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.config.job import JobConfig, ParallelConfig
from megatron_ft.config.placement import PlacementConfig
from megatron_ft.control.rundir import CONFIG_NAME, read_run_config
from megatron_ft.errors import EXIT_INTERRUPTED, CheckpointError, ConfigError, MegatronFtError
from megatron_ft.snapshot.storage.checkpoints import newest_valid


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt with its continuation. Return 0, or the exit code of an error."""
    arguments = _parse(argv)
    try:
        return _generate(arguments)
    except MegatronFtError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.generate", description=__doc__)
    parser.add_argument("path", type=Path, help="folder of a run (its newest checkpoint), or directory of a checkpoint")
    parser.add_argument("--prompt", required=True, help="beginning of the text; empty: the beginning of a document")
    parser.add_argument("--tokens", type=int, required=True, help="largest number of tokens to add")
    parser.add_argument(
        "--temperature", type=float, help="draw tokens with this temperature; default: always the likeliest token"
    )
    parser.add_argument("--seed", type=int, help="seed of the draws; default: 0")
    parser.add_argument(
        "--run",
        type=Path,
        help="folder of the run whose config.yaml has model and tokenizer; default: the folder of the checkpoint",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--trust", action="store_true", help="read a checkpoint without a manifest; it can run code")
    return parser.parse_args(argv)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.tokens < 1:
        raise ConfigError.of("--tokens", arguments.tokens, "must be at least 1")
    temperature = arguments.temperature
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ConfigError.of("--temperature", temperature, "must be greater than 0, or be left out")
    if arguments.seed is not None and temperature is None:
        raise ConfigError.of("--seed", arguments.seed, "has an effect only with --temperature")


def _find(path: Path, run: Path | None) -> tuple[Path, JobConfig]:
    """Return the path of a checkpoint, and a configuration. The checkpoint is ``path``, or the newest one of the run if
    ``path`` is a run's folder. The configuration is that of ``run``, or of the checkpoint's run if ``run`` is None.

    Raises:
        CheckpointError: there is no undamaged checkpoint. DataError: the configuration cannot be read.
    """
    path = path.absolute()
    if not path.is_dir():
        raise CheckpointError(f"{path}: must be the folder of a run or the directory of a checkpoint")
    if not (path / CONFIG_NAME).exists():
        return path, read_run_config(path.parent.parent if run is None else run)
    found, unusable = newest_valid(path / "checkpoints")
    if found is None:
        reasons = "; ".join(f"{each.path}: {each.reason}" for each in unusable) or "there is none"
        raise CheckpointError(
            f"{path}: has no checkpoint that can be used: {reasons}. To make one from a window on "
            "storage, run python -m tools.convert_checkpoint from-window"
        )
    return found, read_run_config(path if run is None else run)


def _in_one_process(config: JobConfig, arguments: argparse.Namespace) -> JobConfig:
    """Return ``config`` changed to one rank with the same model. Raise a ConfigError if ``router`` is not learned."""
    if config.model.router != "learned":
        raise ConfigError.of(
            "model.router", config.model.router, "must be learned: forced routing does not depend on the text"
        )
    return replace(
        config,
        parallel=ParallelConfig(),
        placement=PlacementConfig(),
        training=replace(config.training, device=arguments.device, transformer_impl="auto", recompute_granularity=None),
        checkpoint=replace(config.checkpoint, trust=arguments.trust),
    )


def _generate(arguments: argparse.Namespace) -> int:
    _check(arguments)
    checkpoint, found = _find(arguments.path, arguments.run)
    config = _in_one_process(found, arguments)
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Megatron cannot run on a CPU if it sees a GPU
    from megatron_ft.mcore.device.install import install

    # Must run before any other import of Megatron, because ``install`` patches modules that Megatron imports.
    device, transformer_impl = install(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and Megatron warn about calls in their own code
        import torch

        from megatron_ft.mcore.generation import open_generator

        print(f"{checkpoint}: loading", file=sys.stderr, flush=True)
        place = torch.device(device)
        with open_generator(checkpoint, config, device=place, transformer_impl=transformer_impl) as generator:
            drawn = {"temperature": arguments.temperature, "seed": arguments.seed or 0}
            tokens = list(generator.generate(arguments.prompt, arguments.tokens, **drawn))
            print(arguments.prompt + generator.text(tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
