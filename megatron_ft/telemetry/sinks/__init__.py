"""Sinks: destinations of a run's records, one module per sink. Each entry of ``telemetry.sinks`` names its class."""
