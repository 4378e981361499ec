"""Generates text in one process, with the weights of a dense checkpoint that any number of ranks has saved.

Only the model is built, without an optimizer. Nothing is cached: each token needs a pass over the whole text so far.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ft.config.identity import JobIdentity, settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.samples import resolve_vocab_size
from megatron_ft.corpus.tokenizers import Tokenizer, build_tokenizer
from megatron_ft.errors import CheckpointError, DataError
from megatron_ft.mcore.checkpoint.manager import CheckpointManager
from megatron_ft.mcore.checkpoint.metadata import describe, read_metadata
from megatron_ft.mcore.groups import Groups, dissolve_groups
from megatron_ft.mcore.model.build import build_bare_model
from megatron_ft.mcore.model.fp8_layers import DelayedScaling
from megatron_ft.mcore.model.transformer_config import build_transformer_config
from megatron_ft.mcore.state.train_state import seed_rng
from megatron_ft.snapshot.storage.run_settings import check_source

_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Generates text with a model whose weights are loaded, and with its tokenizer."""

    model: torch.nn.Module
    tokenizer: Tokenizer
    seq_length: int
    """Largest number of tokens on which a prediction depends: the length of a training sample."""
    device: torch.device

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return the logits of the token that follows ``ids``: FP64 [vocab_size], on the CPU. Only the last
        ``seq_length`` ids are used. Entries that only pad the vocabulary are left out."""
        tokens = torch.tensor([ids[-self.seq_length :]], device=self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        found: torch.Tensor = self.model(tokens, positions, None)
        return found[0, -1, : self.tokenizer.vocab_size].double().cpu()

    def generate(
        self, prompt: str, num_tokens: int, *, temperature: float | None = None, seed: int = 0
    ) -> Iterator[int]:
        """Yield at most ``num_tokens`` tokens that continue ``prompt``. Stop earlier at the end of the document.

        Args:
            prompt: beginning of the text. If it is empty, the tokens begin a new document.
            temperature: divisor of the logits; tokens are drawn from their softmax. None takes the likeliest token.
            seed: seed of the draws.

        Raises:
            DataError: the vocabulary has no token for any character of ``prompt``.
        """
        encoded = self.tokenizer.encode(prompt)
        if prompt and not len(encoded):
            raise DataError(f"the vocabulary has no token for any part of the prompt {prompt!r:.60}")
        ids = [self.tokenizer.eod, *encoded.tolist()][bool(prompt) :]
        draws = torch.Generator().manual_seed(seed)
        for _ in range(num_tokens):
            logits = self.logits(ids)
            if temperature is None:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=draws))
            if token == self.tokenizer.eod:
                return
            ids.append(token)
            yield token

    def text(self, tokens: list[int]) -> str:
        """Return the text of ``tokens``."""
        return self.tokenizer.decode(np.asarray(tokens, dtype=np.int64))


@contextmanager
def open_generator(
    checkpoint: Path, config: JobConfig, *, device: torch.device, transformer_impl: str
) -> Iterator[Generator]:
    """Load the weights of ``checkpoint`` into a new model. Yield a ``Generator`` of text for the ``with`` block.

    Args:
        config: configuration of a job of one rank that has the model and the tokenizer of the checkpoint.
        transformer_impl: ``local`` or ``transformer_engine``.

    Raises:
        CheckpointError: the checkpoint is damaged, is of another model, or has no manifest (see ``checkpoint.trust``).
        ConfigError, DataError: the tokenizer cannot be built.
    """
    tokenizer, vocab_size = build_tokenizer(config.data), resolve_vocab_size(config)
    settings = settings_of(config, data_fingerprint="", vocab_size=vocab_size)
    check_source(checkpoint, settings, weights_only=True, trust=config.checkpoint.trust)
    read_metadata(checkpoint)  # refuses metadata that contains code, which Megatron would run
    groups = Groups.form(
        config.parallel,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        generation=0,
        device=device.type,
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    try:
        seed_rng(config.training.seed, groups.pg_collection)  # Megatron's attention needs random generators
        transformer = build_transformer_config(config, transformer_impl)
        model = build_bare_model(
            config, transformer, vocab_size=vocab_size, device=device, pg_collection=groups.pg_collection
        )
        manager = CheckpointManager(
            config.checkpoint,
            run_dir=checkpoint,  # not used, because nothing is saved
            identity=JobIdentity(run_id="", run_name="", settings=settings),
            topology_record={"world_size": 1},
            group=groups.vote,
            dp_cp_group=groups.pg_collection.dp_cp,
            report=lambda record: None,
        )
        _load(manager, model, checkpoint)
        DelayedScaling([model]).begin()  # computes FP8 scales from the loaded histories
        yield Generator(model=model.eval(), tokenizer=tokenizer, seq_length=config.model.seq_length, device=device)
    finally:
        del groups
        dissolve_groups()


def _load(manager: CheckpointManager, model: torch.nn.Module, checkpoint: Path) -> None:
    try:
        manager.load_weights([model], None, checkpoint)
    # No other rank must raise the same error. ``CheckpointException`` is not a subclass of ``Exception``.
    except (Exception, CheckpointException) as error:
        if isinstance(error, CheckpointError) and "\n" not in str(error):
            raise
        raise CheckpointError(f"{checkpoint}: cannot be loaded: {describe(error)}") from error
