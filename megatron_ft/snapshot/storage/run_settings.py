"""Compares the settings of a job with the settings in the manifests of its run's checkpoints and windows."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_ft.config.identity import Difference, JobIdentity, Settings
from megatron_ft.config.model import YARN_KEYS
from megatron_ft.errors import CheckpointError
from megatron_ft.serde import parse_json
from megatron_ft.snapshot.storage.checkpoints import has_manifest, list_checkpoints, other_iteration
from megatron_ft.snapshot.storage.manifest import Manifest
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Window

SETTINGS = "settings"
"""Key of a window's settings in the header of its first slice; the value is JSON text."""


def check_same_settings(
    run_dir: Path,
    identity: JobIdentity,
    *,
    windows: WindowFolder | None,
    compares_data: bool,
    allow_other_data: bool,
) -> None:
    """Refuse a job whose settings differ from those of its run's saved state, before any rank starts.

    Only the manifests of the newest checkpoint and of rank 0's part of the newest window are read. A manifest that
    cannot be read is skipped here, because the ranks verify the files later.

    Args:
        identity: settings of the job.
        windows: the run's persisted windows; None if it has no folder for them.
        compares_data: whether ``identity`` contains the fingerprint of the data.
        allow_other_data: ``checkpoint.allow_other_data``, which applies only to checkpoints.

    Raises:
        CheckpointError: the newest state has other settings; the message names each key with both values.
    """
    checkpoint = _newest_checkpoint(run_dir / "checkpoints", identity)
    if checkpoint is not None:
        ignores_data = allow_other_data or not compares_data
        allowed = identity.allow_change
        error = other_checkpoint(*checkpoint, identity.settings, ignores_data=ignores_data, allowed=allowed)
        if error is not None:
            raise CheckpointError(error)
    window = None if windows is None else _newest_window(windows, identity)
    # The ranks do not use a window that is older than the checkpoint, so its settings do not matter.
    if window is not None and (checkpoint is None or window[0].last_iteration > checkpoint[1].iteration):
        allowed = identity.allow_change
        error = other_window(*window, identity.settings, ignores_data=not compares_data, allowed=allowed)
        if error is not None:
            raise CheckpointError(error)


def check_source(directory: Path, model: Settings, *, weights_only: bool, trust: bool) -> None:
    """Check that a new run can start from ``directory``, before any rank starts. Only the manifest is read.

    Args:
        model: settings of the job's model (concern ``model`` of ``settings_of``).
        weights_only: whether only the weights are loaded (``checkpoint.load_weights``).
        trust: ``checkpoint.trust``.

    Raises:
        CheckpointError: there is no such directory; it has no manifest and ``trust`` is false; its weights belong to
            another model; or it contains only weights, and more is to be loaded.
    """
    if not has_manifest(directory, trust=trust, key="checkpoint.load_weights" if weights_only else "checkpoint.load"):
        return
    stored = Manifest.read(directory).settings
    if not weights_only:
        if stored and not stored.keys() & {"optimizer"}:
            raise CheckpointError(
                f"checkpoint.load={directory}: contains only weights; set checkpoint.load_weights instead"
            )
        return
    found = other_model(stored, model)
    if stored.get("model") and found:
        differences = "; ".join(map(str, found))
        raise CheckpointError(
            f"checkpoint.load_weights={directory}: its weights belong to another model: {differences}. Set these keys "
            "to the values of the checkpoint"
        )


def other_model(stored: Settings, present: Settings) -> list[Difference]:
    """List the keys of the model in which two settings differ and that determine shapes of weights or outputs."""
    one, other = ({key: _normal(key, each.get("model", {})) for key in _FUNCTION} for each in (stored, present))
    return Difference.between({"model": one}, {"model": other})


_EQUAL_IF_NULL = {
    "model.num_query_groups": "model.num_attention_heads",
    "model.moe_ffn_hidden_size": "model.ffn_hidden_size",
}
"""Keys that have the value of another key if they are null, with this other key."""
_FUNCTION = tuple(
    f"model.{name}"
    for name in (
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size"),
        *("untie_embeddings_and_output_weights", "position_embedding_type", "rotary_base", "rotary_percent"),
        *("normalization", "layernorm_epsilon", "gated_linear_unit", "activation", "add_bias_linear", "add_qkv_bias"),
        *("qk_layernorm", "num_moe_experts", "moe_layer_freq", "moe_first_dense_layers", "moe_ffn_hidden_size"),
        *("moe_router_topk", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
        *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "multi_latent_attention"),
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
        *YARN_KEYS,
    )
)
"""Keys of the model that determine the shapes of weights, or how outputs are computed from weights."""


def _normal(key: str, values: Mapping[str, Any]) -> Any:
    value = values.get(key)
    if value is None and key in _EQUAL_IF_NULL:
        return values.get(_EQUAL_IF_NULL[key])
    if value is None and key == "model.kv_channels" and values.get("model.num_attention_heads"):
        return values.get("model.hidden_size", 0) // values["model.num_attention_heads"]
    return value


def other_checkpoint(
    path: Path, manifest: Manifest, settings: Settings, *, ignores_data: bool, allowed: Collection[str] = ()
) -> str | None:
    """Describe the settings in which a checkpoint differs from the job. Return None if there is no difference.

    Args:
        allowed: keys that may differ (``run.allow_change``).
    """
    if manifest.format_version == 1:  # it has no settings
        return None
    found = _differences(manifest.settings, settings, ignores_data=ignores_data, allowed=allowed)
    if not found:
        return None
    return (
        f"{path}: was written with other settings than this job has: {'; '.join(map(str, found))}. Resume "
        f"with its settings, or begin another run from its state: run.name=<another> checkpoint.load={path}"
    )


def other_window(
    window: Window, where: str, settings: Settings, *, ignores_data: bool = False, allowed: Collection[str] = ()
) -> str | None:
    """Describe the settings in which a window differs from the job. Return None if there is no difference.

    Args:
        allowed: keys that may differ (``run.allow_change``).

    Raises:
        CheckpointError: the window has no readable settings.
    """
    if window.format_version == 1:  # it has no settings
        return None
    try:
        stored = parse_json(window.slices[0].header[SETTINGS])
        found = _differences(stored, settings, ignores_data=ignores_data, allowed=allowed)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: must contain readable settings of the job: {error!r}") from None
    if not found:
        return None
    return (
        f"{where}: was captured with other settings than this job has: {'; '.join(map(str, found))}. Resume "
        "with its settings, or begin another run"
    )


def _differences(
    stored: Settings, present: Settings, *, ignores_data: bool, allowed: Collection[str]
) -> list[Difference]:
    found = Difference.between(stored, present)
    return [each for each in found if each.key not in allowed and not (ignores_data and each.concern == "data")]


def _newest_checkpoint(folder: Path, identity: JobIdentity) -> tuple[Path, Manifest] | None:
    for stored in reversed(list_checkpoints(folder)):
        if not stored.complete:
            continue
        try:
            manifest = Manifest.read(stored.path)
        except CheckpointError:
            continue
        run_id, run_name, version = manifest.run_id, manifest.run_name, manifest.format_version
        is_own = identity.not_of_run(run_id=run_id, run_name=run_name, format_version=version) is None
        if is_own and other_iteration(stored.path, manifest) is None:
            return stored.path, manifest
    return None


def _newest_window(folder: WindowFolder, identity: JobIdentity) -> tuple[Window, str] | None:
    for stored in reversed(folder.list_windows()):
        try:
            with folder.open(stored, 0) as opened:
                window, where = opened.window, opened.path
            other_window(window, where, identity.settings)
        except CheckpointError:
            continue
        if identity.not_of_run(run_id=window.run_id, run_name="", format_version=window.format_version) is None:
            return window, where
    return None
