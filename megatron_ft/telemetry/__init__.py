"""Reports of a run: sinks of metrics and events. ``open_sinks`` is the way in."""

from megatron_ft.telemetry.sinks import SinkSet, open_sinks

__all__ = ["SinkSet", "open_sinks"]
