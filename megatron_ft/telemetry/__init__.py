"""Reports of a run: sinks of metrics and events. ``open_sinks`` opens them."""

from megatron_ft.telemetry.sink_set import SinkSet, open_sinks

__all__ = ["SinkSet", "open_sinks"]
