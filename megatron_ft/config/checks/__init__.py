"""Checks of a configuration, one file per topic. Pure functions: no files, no torch, no Hydra."""
