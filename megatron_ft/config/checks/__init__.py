"""Checks of a configuration, one file per topic. They use no files, no torch and no Hydra."""
