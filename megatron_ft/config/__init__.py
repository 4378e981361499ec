"""Typed knobs of a job, one file per Hydra group; ``JobConfig`` on top. No torch, no Hydra."""
