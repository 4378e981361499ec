"""Rules a configuration must meet, one file per topic. Pure: no files, no torch, no Hydra."""
