"""The upstream log's room, and what a stage that replays alone could not repeat bit for bit."""

from megatron_ft.config.checks.primitives import at_least, require
from megatron_ft.config.job import JobConfig


def check_upstream_log(config: JobConfig) -> None:
    """``upstream_log``; with ``launch.keep_layout`` also what couples stages beside the tensors that are logged.

    Raises:
        ConfigError: names key, value and constraint.
    """
    at_least(0, "upstream_log.commit_lag_iterations", config.upstream_log.commit_lag_iterations)
    at_least(1, "upstream_log.memory_limit_bytes", config.upstream_log.memory_limit_bytes)
    if config.launch.keep_layout:
        _check_replays_exactly(config)


def _check_replays_exactly(config: JobConfig) -> None:
    """A stage computes the same from its window, its samples and its neighbours' logs alone.

    Nothing else of an iteration passes from stage to stage but what the vote settles (the norm, found-inf, the loss
    scale) and the number of tokens, which each stage can count. Random numbers are part of the window.
    """
    reason = "launch.keep_layout=true"
    require(
        config.training.deterministic,
        "training.deterministic",
        config.training.deterministic,
        f"must be true with {reason}: a replay that comes to other bits than a survivor had is refused",
    )
    stages = config.parallel.pipeline_model_parallel_size
    require(
        stages == 1 or config.model.untie_embeddings_and_output_weights,
        "model.untie_embeddings_and_output_weights",
        config.model.untie_embeddings_and_output_weights,
        f"must be true with {reason} and parallel.pipeline_model_parallel_size={stages}: the first and the last stage "
        "add their gradients of tied embeddings, which are not in the upstream log",
    )
    require(
        config.precision.fp8 is None or config.precision.fp8_recipe != "delayed",
        "precision.fp8_recipe",
        config.precision.fp8_recipe,
        f"must not be delayed with {reason} and precision.fp8={config.precision.fp8}: windows do not hold the history "
        "of largest values that its scales come from",
    )
