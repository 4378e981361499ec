"""The jobs of claims about GPUs have the size that the claims name."""

from benchmarks import gpu_engine
from pretrain_moe import compose
from tools.gpu import recovery


def test_jobs_have_the_size_that_claims_name() -> None:
    config, _ = compose([*recovery.job_words("cuda", 60), *recovery.windows(1), *gpu_engine.slice_words()])
    assert config.model.hidden_size == 2048 and config.model.num_moe_experts == 16
    assert config.training.device == "cuda" and config.training.train_iterations == 60
