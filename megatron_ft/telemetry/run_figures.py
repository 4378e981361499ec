"""Computes metrics that depend on several records of a run, such as goodput and the duration of a recovery."""

from megatron_ft import events
from megatron_ft.events import Metrics, Record
from megatron_ft.telemetry.goodput import Goodput, GoodputMeter, duration


class RunFigures:
    """Computes figures of a run from its records, which must be added oldest first. It stores four numbers for each
    reported iteration."""

    def __init__(self) -> None:
        self.attempts: list[events.RunStarted] = []
        """``RunStarted`` records: one for each time at which all ranks were started or restarted."""
        self._meter = GoodputMeter()
        self._lasting: dict[str, float] = {}
        """Metrics from events, by name: newest value or sum over the run. Each is valid until an event changes it."""
        self._recovered: dict[str, float] = {}
        """Seconds that recoveries took since the last call of ``hand_out``, by name of the recovery strategy."""
        self._strategy: str | None = None
        self._so_far = self._meter.so_far()
        """Goodput up to the newest reported iteration."""

    @property
    def goodput(self) -> Goodput:
        """Return the goodput up to the newest record. Its median duration of iterations is None."""
        return self._meter.so_far()

    def whole_goodput(self) -> Goodput:
        """Return the goodput with the median duration of iterations. The call takes longer the longer the run is."""
        return self._meter.result()

    @property
    def survival(self) -> float | None:
        """Return the probability that the job survives the loss of one failure domain with its current placement."""
        return self._lasting.get("replicas/single_loss_survival")

    @property
    def window_iterations(self) -> float | None:
        """Return the number of iterations over which a snapshot window is captured."""
        return self._lasting.get("snapshot/window_iterations")

    def take(self, record: Record) -> None:
        """Add a record of the run."""
        self._meter.take(record)
        match record:
            case Metrics():
                self._train()
            case events.RunStarted():
                self._start(record)
            case events.RecoveryStarted():
                self._strategy = record.strategy
            case events.MembershipChanged():
                self._lasting["job/world_size"] = record.world_size
            case events.PlacementInForce():
                self._place(record)
            case events.SnapshotPlanned():
                self._lasting["snapshot/window_iterations"] = record.window_iterations
            case events.WindowCommitted():
                self._capture(record)
            case events.PipelineIdle():
                for stage, seconds in enumerate(record.seconds):
                    self._lasting[f"pipeline/stage_{stage}_idle_seconds"] = seconds
            case events.UpstreamLogPlanned():
                self._lasting["upstream_log/rank_bytes"] = record.log_bytes
                self._lasting["upstream_log/node_bytes"] = record.node_bytes

    def hand_out(self) -> dict[str, float]:
        """Return all figures by name. Only the first call after a recovery also returns the time of the recovery."""
        found, recovered, self._recovered = self.goodput, self._recovered, {}
        goodput = {
            "goodput/ettr": found.ettr,
            "goodput/ettr_predicted": found.predicted_ettr,
            "goodput/tokens_per_second": found.tokens_per_second,
            "goodput/interruptions": found.num_interruptions,
        }
        known = {name: float(value) for name, value in goodput.items() if value is not None}
        return self._lasting | known | {f"recovery/{strategy}_seconds": took for strategy, took in recovered.items()}

    def _train(self) -> None:
        before, self._so_far = self._so_far, self._meter.so_far()
        # The first iteration after a recovery ends the recovery, so the duration of the recovery is known only now.
        if self._so_far.num_interruptions > before.num_interruptions:
            strategy = self._strategy or "unknown"
            took = max(0.0, self._so_far.recovery_seconds - before.recovery_seconds)
            self._recovered[strategy] = self._recovered.get(strategy, 0.0) + took
        self._strategy = None

    def _start(self, record: events.RunStarted) -> None:
        self.attempts.append(record)
        if record.resumed_from_iteration is None:
            self._strategy = self._strategy or "start_over"
        # Placement, window and log of the previous attempt ended with its ranks.
        self._lasting = {name: value for name, value in self._lasting.items() if name in _OF_THE_RUN}
        self._lasting |= {"job/attempt": len(self.attempts), "job/world_size": record.world_size}

    def _place(self, record: events.PlacementInForce) -> None:
        figures = {
            "replicas/fewest": record.fewest_replicas,
            "replicas/mean": record.mean_replicas,
            "replicas/most": record.most_replicas,
            "replicas/single_loss_survival": record.single_loss_survival,
        }
        for name, value in figures.items():
            # A figure that the new placement lacks must not remain from the previous placement.
            self._lasting.pop(name, None)
            if value is not None:
                self._lasting[name] = value

    def _capture(self, record: events.WindowCommitted) -> None:
        risen = {
            "snapshot/stalled_seconds": duration(record.stalled_seconds),
            "snapshot/captured_bytes": record.captured_bytes,
            "snapshot/replicated_bytes": record.replicated_bytes,
            "snapshot/persisted_bytes": record.persisted_bytes,
            "snapshot/idle_copied_bytes": record.idle_copied_bytes,
        }
        for name, value in risen.items():
            if value is not None:
                self._lasting[name] = self._lasting.get(name, 0.0) + value
        for name in ("at_risk_share", "lost_share", "owed_share"):
            if (share := getattr(record, name)) is not None:
                self._lasting[f"tokens/{name}"] = share


_OF_THE_RUN = frozenset(
    f"snapshot/{name}"
    for name in ("stalled_seconds", "captured_bytes", "replicated_bytes", "persisted_bytes", "idle_copied_bytes")
)
"""Metrics that are sums over the run's events. Other metrics from events are dropped when all ranks are restarted."""
