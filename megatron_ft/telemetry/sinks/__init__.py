"""Sinks for records, one module per sink. An entry of ``telemetry.sinks`` names its class by ``_target_``."""
