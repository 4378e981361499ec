"""Stage ``training`` of ``tools/gpu_day.py``, a series of tests on a GPU: trains one rank in every precision.
The losses must equal those of the CPU within a tolerance, and two runs on the GPU must give the same bits."""

from typing import Any

from tools.gpu import ranks
from tools.gpu.day import Day

MODEL = {
    "model.num_layers": 2,
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_enable_expert_bias": True,
    "training.transformer_impl": "local",
}
_FP8 = {"precision.params_dtype": "bf16", "precision.fp8": "hybrid"}
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 1e-5),
    "bf16": ({"precision.params_dtype": "bf16"}, 2e-2),
    "fp16": ({"precision.params_dtype": "fp16"}, 2e-2),
    "fp8 tensorwise": ({**_FP8, "precision.fp8_recipe": "tensorwise"}, 5e-2),
    "fp8 blockwise": ({**_FP8, "precision.fp8_recipe": "blockwise"}, 5e-2),
    "recompute": ({"training.recompute_granularity": "full"}, 1e-5),
    "grouped queries": ({"model.num_query_groups": 2}, 1e-4),
    "shared expert": ({"model.moe_shared_expert_intermediate_size": 32}, 1e-4),
}
"""Maps each variant to its overrides, and the largest allowed relative difference of its losses from fp32 on a CPU."""
ON_SHORT_DAYS = ("bf16",)
_SECONDS = 60.0


def run(day: Day) -> None:
    """Train each of ``VARIANTS`` twice on the device, and once in fp32 on the CPU. Compare the results."""
    names = list(VARIANTS) if day.has_gpu else list(ON_SHORT_DAYS)
    jobs = {name: _job("cpu", fp32(VARIANTS[name][0])) for name in names}
    with day.part("training on the CPU"):
        expected = ranks.run_apart(jobs, folder=day.folder, seconds=day.remaining_seconds - 10)
        for name in names:
            with day.part(name):
                _compare(day, name, expected[name][0])


def _compare(day: Day, name: str, expected: dict[str, Any]) -> None:
    overrides, tolerance = VARIANTS[name]
    job = _job(day.device_type, overrides)
    first, second = (
        ranks.run_ranks("tools.gpu.ranks:train", world_size=1, arguments={"config": job["config"]}, seconds=_SECONDS)[0]
        for _ in range(2)
    )
    worst = ranks.difference(first, expected)
    same = ranks.bits(first) == ranks.bits(second)
    day.record(
        **{
            name: {
                "difference": worst,
                "same_bits": same,
                "seconds": first["seconds"],
                "peak_bytes": first["peak_bytes"],
            }
        }
    )
    day.check(first["device"] == day.device_type, f"{name}: trained on {first['device']}, not on {day.device_type}")
    day.check(worst <= tolerance, f"{name}: differs by {worst:.2e} from the CPU, at most {tolerance:g} is allowed")
    day.check(same, f"{name}: two runs on the device differ: {_where(first, second)}")


def _where(first: dict[str, Any], second: dict[str, Any]) -> str:
    mine, other = ranks.bits(first), ranks.bits(second)
    return ", ".join(f"{name} {mine[name]} and {other[name]}" for name in mine if mine[name] != other[name])


def _job(device_type: str, overrides: dict[str, Any]) -> dict[str, Any]:
    return {"config": ranks.config_for(device_type, {**MODEL, **overrides}), "world_size": 1}


def fp32(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return ``overrides`` without keys of ``precision``, so that the CPU trains the variant in fp32."""
    return {key: value for key, value in overrides.items() if not key.startswith("precision.")}
