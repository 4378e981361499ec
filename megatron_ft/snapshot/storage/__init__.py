"""Checkpoints and windows on storage: written with checksums, complete only with a manifest, verified before use."""
