"""Typed configuration of a job: one dataclass for each Hydra group, and ``JobConfig``, which contains them all.

Imports neither torch nor Hydra.
"""
