"""Sinks for records, one module each. ``telemetry.sinks`` names them by ``_target_``."""
