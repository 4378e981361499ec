"""Typed configuration of a job, one file per Hydra group, and ``JobConfig`` over all of them. No torch, no Hydra."""
