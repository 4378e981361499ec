"""Files of checkpoints: written with checksums, committed by a manifest, verified before use."""
