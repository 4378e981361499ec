"""Checkpoints and snapshot windows on storage. They are written with checksums and verified before use."""
