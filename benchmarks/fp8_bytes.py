"""Claim ``fp8-bytes``: windows of the five low-precision regimes of MoEvement's table 7, and their bytes.

Part 1 computes the window length W from the bytes of the regimes and the iteration times behind the table's overheads,
at the bandwidth that fits all printed W but one, and at that of PCIe 5. Part 2 captures windows of ``ScaledAdamW``,
counts their bytes, and restores them. Part 3 compares the time of packing and unpacking state with ``memmove``.
"""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.report import finish, parse_arguments
from megatron_ft.operators import Component, OperatorId, StateShard, operators_of
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.plan import Piece, window_bytes
from megatron_ft.planning.snapshot.policy import SnapshotContext
from megatron_ft.planning.snapshot.sparse_window import SparseWindow
from megatron_ft.snapshot.capture.capture import WindowCapture, open_copier
from megatron_ft.snapshot.window import Slice
from megatron_ft.testing.demands import algorithm_1, expert, quantized, rest
from megatron_ft.testing.ranks import compose
from transformer_engine_ext.adamw import Hyperparameters, ScaledState, update
from transformer_engine_ext.codec import layout, pack, unpack
from transformer_engine_ext.optimizer import ParameterRange, ScaledAdamW
from transformer_engine_ext.quantized import BLOCK_ELEMENTS, byte_view, num_blocks
from transformer_engine_ext.regimes import REGIMES, Regime

ID = "fp8-bytes"
PRINTED = (3, 6, 4, 3, 3)
"""W of table 7, in the order of ``REGIMES``."""
OVERHEADS = (
    ((2.91, 0.97), (3.51, 1.17)),
    ((8.89, 3.86), (10.70, 4.65)),
    ((7.25, 3.45), (8.73, 4.16)),
    ((2.92, 1.54), (3.52, 1.85)),
    ((2.19, 1.29), (2.63, 1.55)),
)
"""Overhead of MoC in seconds and as a share of an iteration, at an MTBF of one hour and of ten minutes. The columns of
the other systems give the same times, but are rounded more coarsely."""
BYTES = ((6, 2), (12, 1), (10, 1), (5, 1), (4, 1))
"""Bytes per parameter of active and frozen operators, without scales."""
UNEXPLAINED = 2
"""Row of table 7 whose printed W fits no bandwidth that fits all other rows."""
NUM_LAYERS, NUM_EXPERTS = 28, 64
PIPELINE_SIZE, EXPERT_SIZE = 8, 8
PCIE_5_BYTES_PER_SECOND = 64e9
"""Raw rate of 16 lanes of PCIe 5 in one direction."""
MAX_CODEC, PAIRS, QUICK_PAIRS = 1.3, 15, 7
EXPERT_PARAMETERS = 3 * 2048 * 1408
"""Parameters whose state is packed: those of one expert of DeepSeek-MoE."""
SIZES = {expert(1, 0): (96, 128), expert(1, 1): (96, 128), expert(1, 2): (96, 128), rest(1): (70, 64), rest(2): (13, 9)}
"""Shapes of the parameters of part 2. The elements of the last one fill no whole number of blocks."""
WINDOW_ITERATIONS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Compute W and count the bytes of captured windows for all regimes, and time the codec."""
    arguments = parse_arguments(__doc__, argv)
    torch.manual_seed(0)
    windows = Windows.fit()
    captured = {name: capture(regime) for name, regime in REGIMES.items()}
    torch.set_num_threads(1)  # memmove uses one thread
    pairs = QUICK_PAIRS if arguments.quick else PAIRS
    timed = {name: time_codec(regime, EXPERT_PARAMETERS, pairs) for name, regime in REGIMES.items()}
    for number, name in enumerate(REGIMES):
        row, codec = captured[name], timed[name]
        print(
            f"{name}: {windows.seconds[number]:.1f} s, W printed {PRINTED[number]}, at {windows.bandwidth:.2f} bytes/s "
            f"per parameter {windows.fitted[number]} (planned {windows.planned[number]}), PCIe 5 "
            f"{windows.pcie[number]}; window {row['active']:.4f} and {row['frozen']:.4f} bytes per parameter, restored "
            f"{row['is_restored']}; pack {codec['pack']:.2f}x and unpack {codec['unpack']:.2f}x memmove"
        )
    slowest = max(ratio for row in timed.values() for ratio in row.values())
    has_bytes = all(row["has_expected_bytes"] and row["is_restored"] for row in captured.values())
    figure = (
        f"W = {_list(windows.fitted)} at {windows.per_gpu / 1e9:.2f} GB/s a GPU (printed {_list(PRINTED)}; the third "
        f"cell fits no bandwidth that fits the others), {_list(windows.pcie)} at 64 GB/s; captured "
        f"{_pairs(captured)} bytes per active/frozen parameter; codec {slowest:.2f}x memmove"
    )
    return finish(
        arguments.out,
        ID,
        passed=windows.is_explained and has_bytes and slowest <= MAX_CODEC,
        figure=figure,
        threshold=f"one bandwidth gives all printed W but the third, no inversion; captured bytes are those of the "
        f"formats and restore equal bits; codec <= {MAX_CODEC}x memmove",
        counts={"regimes": len(REGIMES), "pairs": pairs},
        details={
            "iteration_seconds": windows.seconds,
            "bandwidths": windows.bandwidths,
            "bytes_per_second_and_parameter": windows.bandwidth,
            "bytes_per_second_and_gpu": windows.per_gpu,
            "fitted": windows.fitted,
            "planned": windows.planned,
            "pcie_5": windows.pcie,
            "printed": PRINTED,
            "captured": captured,
            "codec": timed,
        },
    )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _pairs(captured: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{row['active']:.2f}/{row['frozen']:.2f}" for row in captured.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """W of all regimes at the fitted bandwidth and at a PCIe 5 link."""

    seconds: tuple[float, ...]
    bandwidths: list[tuple[int, int]]
    """Smallest and largest bandwidth with which each row has its printed W, in hundredths of a byte per second and
    parameter."""
    bandwidth: float
    """Middle of the bandwidths that fit every row but ``UNEXPLAINED``, in bytes per second and parameter."""
    per_gpu: float
    """The same bandwidth in bytes per second of one GPU."""
    fitted: list[int]
    planned: list[int]
    """W of this project's planner, whose slices leave out what earlier slices contain."""
    pcie: list[int]
    is_explained: bool

    @classmethod
    def fit(cls) -> "Windows":
        """Fit one bandwidth to the printed W."""
        regimes = list(REGIMES.values())
        seconds = tuple(round(statistics.mean(lost / share for lost, share in row), 1) for row in OVERHEADS)
        fits = [
            {found for found in range(50, 250) if _window(regime, found / 100 * time_) == printed}
            for regime, time_, printed in zip(regimes, seconds, PRINTED, strict=True)
        ]
        common = set.intersection(*(found for number, found in enumerate(fits) if number != UNEXPLAINED))
        assert common, "no bandwidth fits the rows"
        bandwidth = statistics.median(sorted(common)) / 100
        parameters = _parameters_of_a_gpu()
        timed = list(zip(regimes, seconds, strict=True))
        fitted = [_window(regime, bandwidth * time_) for regime, time_ in timed]
        follows = [mine == shown for mine, shown in zip(fitted, PRINTED, strict=True)]
        has_inversion = any(
            mine > other
            for mine, printed in zip(fitted, PRINTED, strict=True)
            for other, shown in zip(fitted, PRINTED, strict=True)
            if printed < shown
        )
        has_bytes = all(
            (int(regime.full_bytes), int(regime.frozen_bytes)) == wanted
            for regime, wanted in zip(regimes, BYTES, strict=True)
        )
        only_third = [number for number, is_same in enumerate(follows) if not is_same] == [UNEXPLAINED]
        return cls(
            seconds=seconds,
            bandwidths=[(min(found), max(found)) for found in fits],
            bandwidth=bandwidth,
            per_gpu=bandwidth * parameters,
            fitted=fitted,
            planned=[_planned(regime, bandwidth, time_) for regime, time_ in timed],
            pcie=[_window(regime, PCIE_5_BYTES_PER_SECOND / parameters * time_) for regime, time_ in timed],
            is_explained=only_third and not has_inversion and has_bytes and common.isdisjoint(fits[UNEXPLAINED]),
        )


def _window(regime: Regime, budget: float) -> int:
    return algorithm_1(regime.full_bytes, regime.frozen_bytes, budget, NUM_LAYERS * NUM_EXPERTS)


def _parameters_of_a_gpu() -> float:
    """Return the parameters of DeepSeek-MoE on one GPU with the parallel sizes of section 5.7. All ranks of a
    data-parallel group have the same."""
    operators = operators_of(compose("model=deepseek_moe_16b").model)
    experts = sum(operator.num_parameters for operator in operators if operator.id.expert is not None)
    others = sum(operator.num_parameters for operator in operators) - experts
    return experts / (PIPELINE_SIZE * EXPERT_SIZE) + others / PIPELINE_SIZE


def _planned(regime: Regime, bandwidth: float, seconds: float) -> int:
    full, frozen, size = quantized(regime.full()), quantized(regime.frozen()), 6400
    shards = tuple(
        _shard(expert(1 + number // NUM_EXPERTS, number % NUM_EXPERTS), size, full, frozen)
        for number in range(NUM_LAYERS * NUM_EXPERTS)
    )
    context = SnapshotContext(bandwidth_bytes_per_second=bandwidth * size * len(shards), iteration_seconds=seconds)
    return SparseWindow().plan(Demand(shards_by_rank=(shards,)), context).num_iterations


def _shard(
    operator: OperatorId, num_elements: int, full: tuple[Component, ...], frozen: tuple[Component, ...]
) -> StateShard:
    return StateShard(
        operator=operator,
        parameter=str(operator),
        tensor_part=0,
        start=0,
        stop=num_elements,
        full=full,
        frozen=frozen,
    )


class _Client:
    """Replacement of the snapshot server's client, which records where each slice begins in the buffer."""

    def __init__(self) -> None:
        self.offsets: dict[int, int] = {}

    def begin(self, buffer: int, *, start_iteration: int, num_slices: int, plan: Mapping[str, Any]) -> None:
        """Begin a window."""
        self.offsets.clear()

    def captured(self, buffer: int, index: int, part: Slice) -> None:
        """Note the offset of a complete slice."""
        self.offsets[index] = part.offset


class Trained:
    """Parameters that ``ScaledAdamW`` trains, and their state as the tensors that a window captures."""

    def __init__(self, regime: Regime) -> None:
        self.regime = regime
        self.parameters = {str(key): torch.nn.Parameter(torch.randn(shape) * 0.02) for key, shape in SIZES.items()}
        ranges = {id(found): ParameterRange(name=name) for name, found in self.parameters.items()}
        self.optimizer = ScaledAdamW([{"params": list(self.parameters.values())}], regime=regime, ranges=ranges, seed=1)
        self.state = {name: self.optimizer.scaled_state(found) for name, found in self.parameters.items()}
        self.weights = {name: found.compute_weights() for name, found in self.state.items()}
        self.gradients: list[dict[str, torch.Tensor]] = []
        """Gradients of every update, by parameter."""

    def step(self) -> None:
        """Update all parameters once with random gradients, and then their compute weights."""
        self.gradients.append({name: torch.randn_like(found) for name, found in self.parameters.items()})
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[-1][name]
        self.optimizer.step()
        for name, found in self.state.items():
            if self.weights[name] is not found.master:
                self.weights[name].copy_(found.compute_weights())

    def parts(self, name: str) -> dict[str, torch.Tensor]:
        """Return codes and scales of the full state and of the compute weights of one parameter, as views."""
        weight = self.weights[name]
        return {**self.state[name].parts(), "weight": weight.codes, "weight_scales": weight.scales}

    def elements(self, piece: Piece) -> torch.Tensor:
        """Return the values of a piece, 1-D."""
        found = self.parts(piece.parameter)[piece.component].reshape(-1)
        if piece.component.endswith("_scales"):
            return found[piece.start // BLOCK_ELEMENTS : -(-piece.stop // BLOCK_ELEMENTS)]
        return found[piece.start : piece.stop]

    def replays(self, name: str, parts: Mapping[str, torch.Tensor], num_updates: int) -> bool:
        """Return whether the full state ``parts`` after ``num_updates`` updates becomes the present state, bit for bit,
        if the later updates are repeated."""
        empty = {kind: found[:0] for kind, found in self.state[name].parts().items()}
        again = ScaledState.from_parts(self.regime, empty | parts, name=name, start=0)
        group = self.optimizer.param_groups[0]
        values = Hyperparameters(lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1])
        for number in range(num_updates, len(self.gradients)):
            update(again, self.gradients[number][name].reshape(-1), values, step=number + 1, seed=self.optimizer.seed)
        present = self.state[name].parts()
        return all(byte_view(found).equal(byte_view(present[kind])) for kind, found in again.parts().items())


def capture(regime: Regime) -> dict[str, Any]:
    """Capture one window of a training with ``regime``: one slice after each update, and two more updates.

    Returns:
        the bytes per parameter of operators that are captured in full and of frozen ones, counted in the buffer; and
        whether they are those of the formats, and whether each captured state can be replayed to the present state.
    """
    trained, client = Trained(regime), _Client()
    full, frozen = quantized(regime.full()), quantized(regime.frozen())
    shards = [_shard(key, rows * columns, full, frozen) for key, (rows, columns) in SIZES.items()]
    context = SnapshotContext(bandwidth_bytes_per_second=1e12, iteration_seconds=1.0)
    policy = SparseWindow(min_window_iterations=WINDOW_ITERATIONS, max_parts=1)
    plan = policy.plan(Demand(shards_by_rank=(tuple(shards),)), context)
    buffer = torch.zeros(window_bytes(plan, shards), dtype=torch.uint8)
    copier = open_copier(torch.device("cpu"))
    captured = WindowCapture(
        plan,
        shards,
        client=client,  # type: ignore[arg-type]
        copier=copier,
        buffers=[buffer],
        source=trained.elements,
    )
    is_frozen_equal = True
    for index, pieces in enumerate(captured.pieces):
        trained.step()
        captured.begin_slice(0, index, iteration=index, header=dict)
        captured.settle()
        for name, parts in _read(trained, buffer, client.offsets[index], pieces).items():
            wanted = trained.parts(name)
            is_frozen_equal &= all(byte_view(found).equal(byte_view(wanted[kind])) for kind, found in parts.items())
    copier.close()
    trained.step()
    trained.step()
    return {
        **_count(trained, captured.pieces),
        "num_slices": plan.num_iterations,
        "is_restored": is_frozen_equal
        and all(
            trained.replays(name, {kind: found.clone() for kind, found in parts.items()}, index + 1)
            for index, pieces in enumerate(captured.pieces)
            for name, parts in _read(trained, buffer, client.offsets[index], pieces).items()
            if "master" in parts
        ),
    }


def _read(
    trained: Trained, buffer: torch.Tensor, offset: int, pieces: Sequence[Piece]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the captured tensors of a slice by parameter and component, as views of the buffer."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for piece in pieces:
        raw = buffer.narrow(0, offset + piece.offset, piece.num_bytes)
        dtype = trained.parts(piece.parameter)[piece.component].dtype
        found.setdefault(piece.parameter, {})[piece.component] = raw.view(dtype)
    return found


def _count(trained: Trained, slices: Sequence[Sequence[Piece]]) -> dict[str, Any]:
    """Count the captured bytes, and compare those of each parameter with its formats."""
    num_bytes, elements, has_expected_bytes = {True: 0, False: 0}, {True: 0, False: 0}, True
    for pieces in slices:
        for name in {piece.parameter for piece in pieces}:
            own = [piece for piece in pieces if piece.parameter == name]
            is_full = any(piece.component == "master" for piece in own)
            size, found = trained.parameters[name].numel(), sum(piece.num_bytes for piece in own)
            expected = sum(
                size * target.item_bytes + has_scales * num_blocks(size)
                for _, target, has_scales in (trained.regime.full() if is_full else trained.regime.frozen())
            )
            has_expected_bytes &= found == expected
            num_bytes[is_full] += found
            elements[is_full] += size
    return {
        "active": num_bytes[True] / elements[True],
        "frozen": num_bytes[False] / elements[False],
        "window_bytes": sum(num_bytes.values()),
        "has_expected_bytes": has_expected_bytes
        and elements[True] == sum(found.numel() for found in trained.parameters.values()),
    }


def time_codec(regime: Regime, num_parameters: int, num_pairs: int) -> dict[str, float]:
    """Return the times of packing state, and of unpacking it into the state's tensors, as multiples of the time of
    ``memmove`` for as many bytes: medians of the ratios of alternating pairs."""
    state = ScaledState.of(regime, torch.randn(num_parameters) * 0.02, name="w").parts()
    entries, buffer = pack(state)
    num_bytes = layout(state)[1]
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)

    def move() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)

    def restore() -> None:
        for name, found in unpack(entries, buffer).items():
            byte_view(state[name]).copy_(byte_view(found))

    ratios = {}
    acts: dict[str, Callable[[], Any]] = {"pack": lambda: pack(state, buffer), "unpack": restore}
    for kind, act in acts.items():
        pairs = [(_seconds(move), _seconds(act)) for _ in range(num_pairs)]
        ratios[kind] = statistics.median(acted / moved for moved, acted in pairs)
    return ratios


def _seconds(act: Callable[[], Any]) -> float:
    # Time of this thread alone, in which all copies run, so that other processes of the machine lengthen it less.
    began = time.thread_time()
    act()
    return time.thread_time() - began


if __name__ == "__main__":
    sys.exit(main())
