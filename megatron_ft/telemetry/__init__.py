"""Metrics and events of a run, and the sinks that write them. ``open_sinks`` opens the sinks."""

from megatron_ft.telemetry.sink_set import SinkSet, check_sinks, open_sinks

__all__ = ["SinkSet", "check_sinks", "open_sinks"]
