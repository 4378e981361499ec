"""Claim ``lost-tokens``: lost tokens are counted exactly, and the choice of experts keeps few tokens at risk."""

import random
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import recorded
from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from megatron_ft.operators import Component, OperatorId, StateShard, moe_layers
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.expert_choice import Counts, LoadAware, RoundRobin, Sequential, TokenRisk
from megatron_ft.planning.snapshot.lost_tokens import Rows, TokenLedger
from megatron_ft.planning.snapshot.partial_experts import ExpertPolicy, PartialExperts, SelectiveExperts
from megatron_ft.planning.snapshot.partial_windows import PartialWindows
from megatron_ft.planning.snapshot.policy import SnapshotContext
from megatron_ft.planning.trace import RoutingTrace, expert_token_counts
from megatron_ft.serde import parse_json
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.testing.jobs import JobResult, forkserver, run_job
from megatron_ft.testing.ranks import compose

ID = "lost-tokens"
NUM_SCHEDULES, QUICK_SCHEDULES = 100, 5
MOST_AT_RISK = {8: 0.55, 4: 0.5}
"""Largest allowed ratio of tokens at risk: top-S choice over round-robin. The key is E / S, for S of E experts."""
BOUND = 0.0375
WARM = "megatron_ft.mcore.rank_main:warm"
TRAINED: dict[str, tuple[str, ...]] = {
    "in turn": ("snapshot=partial_experts", "snapshot.policy.max_lost_share=null"),
    "most tokens at risk": ("snapshot=selective_experts",),
}
"""Overrides of snapshots of the jobs that train with recorded loads."""
TRAINED_ITERATIONS, TRAINED_FAULTS, BATCH, SEQ_LENGTH, TOPK = 24, (11, 20), 4, 16, 2
INTERVAL, NUM_EXPERTS, ITERATION_SECONDS = 100, 16, 10.0
"""Simulated job with the recorded faults of a cluster: iterations between windows, experts of a layer, seconds of an
iteration."""


@dataclass
class Run:
    """Simulated job. The project's code counts lost tokens (ledger); the log of tokens serves only the recount."""

    policy: ExpertPolicy
    num_layers: int
    num_experts: int
    planned_tokens: int
    iterations_per_step: int = 1
    ledger: TokenLedger = field(init=False)
    log: list[Counts] = field(default_factory=list)
    """Tokens of each step of the present history, ``[layers, experts]``."""
    held: list[int] = field(default_factory=list)
    """Start iterations of the windows in memory, the oldest first. A failure goes back to the newest."""
    lost_log: list[Counts] = field(default_factory=list)
    """Recount of the tokens that each failure has lost."""
    num_captured_again: int = 0
    """Experts, over all layers, that the newest window and the window of the iteration before have captured."""

    def __post_init__(self) -> None:
        self.ledger = TokenLedger.empty([[0] * self.num_experts] * self.num_layers)
        self._demand = _demand(self.num_layers, self.num_experts)
        self._plan = self.policy.plan(
            self._demand, SnapshotContext(bandwidth_bytes_per_second=1e12, iteration_seconds=1.0)
        )
        self._saved: dict[int, tuple[TokenLedger, Rows, Counts, int]] = {}
        self._pieces = [
            _Named(f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.w")
            for layer in range(self.num_layers)
            for expert in range(self.num_experts)
        ]
        self._reset()

    def step(self, tokens: Counts, *, num_kept: int = 1, is_given_up: bool = False) -> None:
        """Run the iterations up to the next window, which process ``tokens``, and capture the window.

        Args:
            num_kept: number of earlier windows that stay in memory.
            is_given_up: whether the window is never committed.
        """
        self.log.append(tokens)
        self.ledger = self.ledger.after(tokens.tolist())
        now = len(self.log) * self.iterations_per_step
        per_iteration = tuple(tuple(row) for row in (tokens // self.iterations_per_step).tolist())
        self._windows.begin(now, self.held, self.ledger, [per_iteration])
        at = self._windows.captured_at(now, self._pieces, self.num_layers)  # type: ignore[arg-type]
        captured_at = np.array(at or [now] * len(self._pieces)).reshape(self.num_layers, self.num_experts)
        again = self._windows.captured_again(now, self._pieces, self.num_layers)  # type: ignore[arg-type]
        self.num_captured_again = len(again)
        if is_given_up:
            return
        self.held = [*self.held[-num_kept:], now]
        at_risk = self._windows.at_risk(now)
        assert at_risk is not None, "the window was just begun"
        self._saved[now] = (self.ledger, at_risk, captured_at, len(self.lost_log))
        self._saved = {start: saved for start, saved in self._saved.items() if start in self.held}

    def fail(self) -> None:
        """Simulate a failure: all ranks continue from the newest window in memory."""
        ledger, at_risk, captured_at, num_lost = self._saved[self.held[-1]]
        steps = self.held[-1] // self.iterations_per_step
        self.ledger, self.log = ledger.after_loss(at_risk), self.log[:steps]
        # The recount adds up the log of tokens; it uses neither the ledger nor the tokens at risk.
        since = captured_at // self.iterations_per_step
        lost = sum((rows * (number >= since) for number, rows in enumerate(self.log)), np.zeros_like(captured_at))
        self.lost_log = [*self.lost_log[:num_lost], lost]
        self._reset()

    @property
    def at_risk(self) -> int:
        """Tokens, over all layers, that a failure would lose now."""
        return int(sum(map(sum, self._saved[self.held[-1]][1])))

    @property
    def num_captured(self) -> float:
        """Mean number of experts of a layer in the newest window."""
        _, _, captured_at, _ = self._saved[self.held[-1]]
        return float((captured_at == self.held[-1]).sum()) / self.num_layers

    @property
    def recounted_share(self) -> float:
        """PLT, from the recount."""
        rows = sum(self.lost_log, np.zeros((self.num_layers, self.num_experts), dtype=np.int64))
        return float(np.mean(rows.sum(axis=1) / self.planned_tokens))

    def _reset(self) -> None:
        self._windows = PartialWindows(self.policy, self._plan, self._demand, self.planned_tokens)
        self._saved = {start: saved for start, saved in self._saved.items() if start in self.held[-1:]}
        # After a recovery, the window from which the job continued stays in memory, but no window copies from it.


@dataclass(frozen=True)
class _Named:
    """Replacement for a piece, with the only fields of a piece that are used here."""

    parameter: str
    component: str = "master"


def _demand(num_layers: int, num_experts: int) -> Demand:
    full = tuple(Component(name=name, dtype="float32", item_bytes=4) for name in ("master", "exp_avg", "exp_avg_sq"))
    weight = (Component(name="weight", dtype="bfloat16", item_bytes=2),)
    operators = [
        OperatorId(layer=layer, kind="expert", expert=expert)
        for layer in range(1, num_layers + 1)
        for expert in range(num_experts)
    ]
    shards = tuple(
        StateShard(operator=one, parameter=str(one), tensor_part=0, start=0, stop=1, full=full, frozen=weight)
        for one in operators
    )
    return Demand(shards_by_rank=(shards,))


def main(argv: Sequence[str] | None = None) -> int:
    """Recount random schedules, replay recorded loads, and run recorded faults with constant and with growing K."""
    arguments = parse_arguments(__doc__, argv)
    num_schedules = QUICK_SCHEDULES if arguments.quick else NUM_SCHEDULES
    differing = [seed for seed in range(num_schedules) if not _counts_are_equal(seed)]
    ratios = _ratios()
    choices = () if arguments.quick else tuple(TRAINED)
    trained = [row for name in choices for row in _train(name)]
    for row in trained:
        print(
            "trained with recorded loads, {choice}, recovery from iteration {iteration}: {counted} tokens counted, "
            "{recounted} in the recording".format(**row)
        )
    is_trained_equal = len(trained) == len(choices) * len(TRAINED_FAULTS) and all(
        row["is_routed"] and row["counted"] == row["recounted"] > 0 and row["share_error"] < 1e-12 for row in trained
    )
    faults = _fault_iterations()
    shares = {name: _with_faults(bound, faults) for name, bound in (("constant", None), ("dynamic", BOUND))}
    print(f"{num_schedules} schedules, {len(differing)} with another recount")
    for row in ratios:
        print(
            "{number} of {experts} experts by {choice}: tokens at risk {ratio:.3f} of round-robin; "
            "{captured_again:.1%} of them were in the window before".format(**row)
        )
    for name, (share, most) in shares.items():
        print(f"{name} K: PLT {share:.2%}, at most {most:.0f} of {NUM_EXPERTS} experts in a window")
    judged = {row["part"]: row["ratio"] for row in ratios if row["choice"] == "LoadAware"}
    again = {row["part"]: row["captured_again"] for row in ratios if row["choice"] == "LoadAware"}
    is_small = all(judged[part] <= most for part, most in MOST_AT_RISK.items())
    return finish(
        arguments.out,
        ID,
        passed=not differing
        and is_small
        and is_trained_equal
        and shares["dynamic"][0] <= BOUND < shares["constant"][0],
        figure=f"{num_schedules - len(differing)} of {num_schedules} schedules equal their recount; tokens at risk "
        f"{judged[8]:.3f} (S=E/8) and {judged[4]:.3f} (S=E/4) of round-robin, and {again[8]:.1%} and {again[4]:.1%} of "
        f"the experts were in the window before, too; PLT {shares['dynamic'][0]:.2%} with "
        f"dynamic K, {shares['constant'][0]:.2%} with K=1 of {NUM_EXPERTS}, {len(faults)} faults, interval {INTERVAL}, "
        f"{ITERATION_SECONDS:g} s an iteration; {len(trained)} recoveries of jobs trained with recorded loads lost "
        f"{sum(row['counted'] for row in trained)} tokens, {sum(row['recounted'] for row in trained)} by the recording",
        threshold=f"all equal, also in jobs; <= {MOST_AT_RISK[8]} and <= {MOST_AT_RISK[4]}; dynamic <= {BOUND:.2%} < "
        "constant",
        counts={
            "schedules": num_schedules,
            "records": ratios[0]["records"],
            "faults": len(faults),
            "trained_recoveries": len(trained),
        },
        details={"ratios": ratios, "differing": differing, "trained": trained},
    )


def _counts_are_equal(seed: int) -> bool:
    """Run a random schedule. Return whether PLT and MLT of the ledger equal those of the recount."""
    generator = random.Random(seed)
    layers, experts = generator.randint(1, 4), 4 * generator.randint(1, 4)
    policies: list[ExpertPolicy] = [
        PartialExperts(num_experts=generator.randint(1, experts), max_lost_share=None),
        PartialExperts(num_experts=1),
        PartialExperts(num_experts=generator.randint(1, experts), choice=LoadAware(), max_lost_share=None),
        SelectiveExperts(num_experts=generator.randint(1, experts)),
        SelectiveExperts(num_experts=generator.randint(1, experts), choice=TokenRisk()),
    ]
    planned = 80 * 50 * experts
    run = Run(generator.choice(policies), layers, experts, planned)
    draw = np.random.default_rng(seed)
    is_equal = True
    for _ in range(80):
        tokens = draw.integers(0, 100, size=(layers, experts))
        run.step(tokens, num_kept=generator.randint(1, 2), is_given_up=bool(run.held) and generator.random() < 0.1)
        if generator.random() < 0.1:
            run.fail()
            pairs = zip(run.lost_log[-1], sum(run.log), strict=True)
            recounted = sum(float(lost.sum() / all_tokens.sum()) for lost, all_tokens in pairs)
            is_equal &= abs(run.ledger.momentary(run.lost_log[-1].tolist()) - recounted) < 1e-12
            is_equal &= np.array_equal(np.array(run.ledger.lost), sum(run.lost_log))
    return is_equal and abs(run.ledger.lost_share(planned) - run.recounted_share) < 1e-12


def _ratios() -> list[dict[str, Any]]:
    """Return the mean tokens at risk on the recorded loads, as ratios to round-robin with the same number of experts.

    The first window captures all experts. This lowers the tokens at risk of a choice by load for longer than those of
    round-robin. So the ratio is computed for all records and for their second half, and the larger value counts.
    """
    loads = recorded.read(recorded.SMARTMOE)
    records = [loads.per_layer(record).astype(np.int64) for record in range(loads.num_records)]
    layers, experts = records[0].shape
    rows = []
    for part in (*MOST_AT_RISK, 2):
        means: dict[str, tuple[float, float]] = {}
        repeated: dict[str, float] = {}
        for choice in (RoundRobin(), Sequential(), TokenRisk(), LoadAware()):
            policy = SelectiveExperts(num_experts=experts // part, choice=choice)
            run, found, again = Run(policy, layers, experts, 10**12), [], []
            for number, tokens in enumerate(records):
                run.step(tokens)
                # Not counted: until round-robin has captured every expert again, the first window lowers its figures.
                if number > part:
                    found.append(run.at_risk)
                    again.append(run.num_captured_again / (run.num_captured * layers))
            means[type(choice).__name__] = float(np.mean(found)), float(np.mean(found[len(found) // 2 :]))
            repeated[type(choice).__name__] = float(np.mean(again))
        rows += [
            {
                "part": part,
                "number": experts // part,
                "experts": experts,
                "choice": name,
                "ratio": max(mean / base for mean, base in zip(both, means["RoundRobin"], strict=True)),
                "ratio_of_all_records": both[0] / means["RoundRobin"][0],
                "captured_again": repeated[name],
                "records": len(records),
            }
            for name, both in means.items()
        ]
    return rows


def _train(choice: str) -> list[dict[str, Any]]:
    """Train a job whose router follows the recording. It ends twice because all of its ranks are killed, and continues
    from the newest file. Return for each recovery the tokens that the job counted as lost, and the recount.

    The recount adds up tokens of the recording, since the iterations that the manifest of the file states for each
    expert. It uses no count of the job.
    """
    words = [
        "model=moe_micro",
        "model.num_moe_experts=8",
        "model.router=trace",
        f"model.router_trace_file={recorded.FOLDER / recorded.SMARTMOE}",
        "launch.ranks_per_node=2",
        "parallel.expert_model_parallel_size=2",
        f"training.train_iterations={TRAINED_ITERATIONS}",
        "training.micro_batch_size=1",
        f"training.global_batch_size={BATCH}",
        "training.eval_interval_iterations=0",
        "telemetry.log_interval_iterations=1",
        "telemetry.expert_load_interval_iterations=1",
        "telemetry.wandb=disabled",
        "run.resume=auto",
        *TRAINED[choice],
        "snapshot.policy.num_experts=2",
        "snapshot.num_peer_copies=0",
        "snapshot.bandwidth_bytes_per_second=1e9",
        "snapshot.iteration_seconds=0.1",
        "snapshot.persist_interval_windows=1",
        "snapshot.keep_persisted=0",
        "run.name=job",
    ]
    with tempfile.TemporaryDirectory(prefix=f"{ID}-") as folder, forkserver(WARM) as socket:
        for fault in TRAINED_FAULTS:
            point = f"testing.failpoints=['kill(at_iteration={fault},phase=\"backward\")']"
            job = run_job([*words, point], forkserver=socket, runs=Path(folder))
            assert job.exit_code != 0, f"no rank was killed in iteration {fault}"
        job = run_job(words, forkserver=socket, runs=Path(folder))
        assert job.exit_code == 0, job.output[-2000:]
        return _recounts(job, choice)


def _recounts(job: JobResult, choice: str) -> list[dict[str, Any]]:
    model = replace(compose("model=moe_micro", "model.num_moe_experts=8").model, router_trace_start=0)
    trace = RoutingTrace.of(model, recorded.read(recorded.SMARTMOE))
    layers = moe_layers(model)
    log = np.array(
        [
            [[BATCH * n for n in expert_token_counts(trace.loads(at, layer), SEQ_LENGTH, TOPK)] for layer in layers]
            for at in range(1, TRAINED_ITERATIONS + 1)
        ]
    )
    events = list(job.records())
    is_routed = all(
        [event["layers"][layer - 1] for layer in layers] == log[event["iteration"] - 1].tolist()
        for event in events
        if event["kind"] == "expert_load"
    )
    rows, total = [], 0
    folder = WindowFolder(job.run_dir / "windows")
    for event in events:
        if event["kind"] != "expert_updates_lost":
            continue
        at = event["iteration"]
        captured = np.zeros(log.shape[1:], dtype=np.int64)
        key = max(window for window in folder.list_windows() if window.start_iteration == at)
        for rank in range(2):
            with folder.open(key, rank) as opened:
                (part,) = opened.verify().slices
            for index, piece in enumerate(part.pieces):
                match = re.search(r"layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\.", piece.parameter)
                if match and piece.component == "master":
                    captured[layers.index(int(match[1]) + 1), int(match[2])] = part.iteration_of(index)
        ages = np.arange(1, at + 1)[:, None, None] > captured
        recounted = int((log[:at] * ages).sum())
        total += recounted
        share = total / (len(layers) * TRAINED_ITERATIONS * BATCH * SEQ_LENGTH * TOPK)
        rows.append(
            {
                "choice": choice,
                "iteration": at,
                "counted": event["num_tokens"],
                "recounted": recounted,
                "share_error": abs(event["lost_share"] - share),
                "is_routed": is_routed,
            }
        )
    return rows


def _fault_iterations() -> list[int]:
    """Return the iterations of the faults of the recorded cluster, in a job that runs as long as the recording."""
    path = ROOT.parent / "shared" / "data" / "traces" / "llm_cluster_faults.json"
    events = parse_json(path.read_bytes())
    assert isinstance(events, list), "the recording is a list of events"
    days = {event["event_time"] for event in events if event["event_type"] == "fault_start"}  # type: ignore[index, call-overload]
    seconds = sorted(float(day) * 86400.0 for day in days)  # type: ignore[arg-type]
    return [int((second - seconds[0]) / ITERATION_SECONDS) for second in seconds]


def _with_faults(bound: float | None, faults: Sequence[int]) -> tuple[float, float]:
    """Run a job with the recorded faults, in which all experts of the layer get tokens at the same rate. Windows begin
    with K=1; the policy may raise K if ``bound`` is given.

    Returns:
        PLT, and the largest K of all windows except the first one and the first ones after failures.
    """
    per_window = 1000 * INTERVAL
    num_windows = faults[-1] // INTERVAL + 1
    policy = PartialExperts(num_experts=1, interval_iterations=INTERVAL, max_lost_share=bound)
    run = Run(policy, 1, NUM_EXPERTS, num_windows * per_window * NUM_EXPERTS, iterations_per_step=INTERVAL)
    tokens = np.full((1, NUM_EXPERTS), per_window)
    at, most, is_whole = 0, 0.0, True
    due = [fault // INTERVAL for fault in faults]
    # Faults come at fixed times, and iterations that run again take time, too. So ``window`` counts intervals of time.
    for window in range(num_windows):
        run.step(tokens)
        most, is_whole = (most if is_whole else max(most, run.num_captured)), False
        while at < len(due) and due[at] == window:
            at += 1
            run.fail()
            is_whole = True
    return run.ledger.lost_share(run.planned_tokens), most


if __name__ == "__main__":
    sys.exit(main())
