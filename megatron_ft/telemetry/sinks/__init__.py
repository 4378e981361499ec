"""Places records go to, one file each; ``telemetry.sinks`` names them by ``_target_``."""
