"""Checks of a configuration, one file per topic. The checks are pure functions: they use no files, no torch, no
Hydra."""
