"""Makes results of commit votes (the collective decision before each update of the weights) for tests."""

from megatron_ft.planning.iteration import Vote


def vote_of(iteration: int, generation: int = 0) -> Vote:
    """Return the vote result of an iteration with finite gradients. The gradient norm in it is 1 + ``iteration``."""
    return Vote(
        generation=generation,
        iteration=iteration,
        found_inf=False,
        grad_norm=1.0 + iteration,
        clip_coefficient=1.0,
        loss_scale=1.0,
        loss=2.0,
        num_tokens=8,
        aux_loss=0.0,
        z_loss=0.0,
    )
