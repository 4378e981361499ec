"""Compares the settings of a job with those in the checkpoints and snapshot windows of the job's run."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_ft.config.identity import Difference, JobIdentity, Settings
from megatron_ft.config.model import YARN_KEYS, ModelConfig
from megatron_ft.errors import CheckpointError
from megatron_ft.serde import decode, parse_json
from megatron_ft.snapshot.storage.checkpoints import (
    StoredCheckpoint,
    has_manifest,
    is_named,
    list_checkpoints,
    other_iteration,
)
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from megatron_ft.snapshot.storage.window_file import rank_name, window_name
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Window

SETTINGS = "settings"
"""Name of the entry with the job's settings in the header of a window's first slice. The entry is JSON text."""


def check_same_settings(
    run_dir: Path,
    identity: JobIdentity,
    *,
    windows: WindowFolder | None,
    compares_data: bool,
    allow_other_data: bool,
) -> None:
    """Check, before any rank starts, that a job has the same settings as the newest saved state of its run.

    Only the manifests of the newest checkpoint and of rank 0's part of the newest window are read. A manifest that
    cannot be read is skipped here, because the ranks verify all files later.

    Args:
        identity: settings of the job.
        windows: the run's persisted windows; None if it has no folder for them.
        compares_data: whether ``identity`` contains the fingerprint of the training data.
        allow_other_data: value of ``checkpoint.allow_other_data``, which applies only to checkpoints.

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


def check_source(directory: Path, settings: Settings | None, *, weights_only: bool, trust: bool) -> None:
    """Check that a new run can start from ``directory``, before any rank starts. Only the manifest is read.

    Args:
        settings: settings of the job (``settings_of``). Only the groups ``model`` and ``optimizer`` are compared. None
            compares nothing; it is used if the job has other errors.
        weights_only: whether the job loads only the weights (``checkpoint.load_weights``).
        trust: value of ``checkpoint.trust``.

    Raises:
        CheckpointError: ``directory`` is not a checkpoint; or it has no manifest and ``trust`` is false; or it contains
            only weights and ``weights_only`` is false; or it does not fit the job. If ``weights_only`` is true, it fits
            if the models are equal; if false, it fits if the tensors of model and optimizer match.
    """
    key = "checkpoint.load_weights" if weights_only else "checkpoint.load"
    name = f"{key}={directory}"
    if directory.is_dir() and not (directory / MANIFEST_NAME).exists():
        refuse_other_folder(directory, name)
    if not has_manifest(directory, trust=trust, key=key):
        return
    stored = Manifest.read(directory).settings
    if not weights_only and stored and not stored.keys() & {"optimizer"}:
        raise CheckpointError(f"{name}: contains only weights; set checkpoint.load_weights instead")
    if not stored.get("model"):  # format 1 records nothing that could be compared
        return
    _check_types(stored["model"], name)
    if settings is None:
        return
    if weights_only:
        if found := other_model(stored, settings):
            raise CheckpointError(
                f"{name}: its weights belong to another model: {_listed(found)}. Set these keys to the values of the "
                "checkpoint"
            )
        return
    # A job may change how outputs are computed, and then reports the difference. It cannot change the shapes.
    if found := other_model(stored, settings, keys=_SHAPES):
        raise CheckpointError(
            f"{name}: has other tensors than the model of this job: {_listed(found)}. Set these keys to the values of "
            "the checkpoint"
        )
    if found := _other_optimizer(stored.get("optimizer", {}), settings.get("optimizer", {})):
        raise CheckpointError(
            f"{name}: has other tensors than the optimizer of this job: {_listed(found)}. Set these keys to the values "
            "of the checkpoint, or load only the weights: checkpoint.load_weights instead of checkpoint.load"
        )


def _check_types(model: Mapping[str, Any], name: str) -> None:
    # Keys that this version does not know are not checked, because a later version may have written them.
    for each in fields(ModelConfig):
        try:
            decode(each.type, model.get(f"model.{each.name}", each.default), f"model.{each.name}")
        except ValueError as error:
            raise CheckpointError(f"{name}: its manifest has an invalid model setting: {error}") from None


def _listed(found: list[Difference]) -> str:
    return "; ".join(map(str, found))


def refuse_other_folder(directory: Path, name: str) -> None:
    """Check that ``directory``, which has no manifest, can be a checkpoint that other software has written.

    Args:
        name: beginning of the error's text, which names the directory.

    Raises:
        CheckpointError: the directory has no file ``.metadata``, or is another folder of this project, such as a run.
            The error says what the directory is and what to use instead.
    """
    has_metadata = (directory / ".metadata").exists()
    if (directory / "config.yaml").is_file() and not has_metadata:
        raise CheckpointError(
            f"{name}: must be a checkpoint or a window, but is the folder of a run; its {_newest_states(directory)}"
        )
    if stored := list_checkpoints(directory):
        raise CheckpointError(f"{name}: must be a checkpoint, but is a folder of checkpoints; {_newest_of(stored)}")
    if (directory.parent.parent / "run_id.json").is_file() and is_named(directory):
        others = _newest_of(list_checkpoints(directory.parent))
        raise CheckpointError(f"{name}: is incomplete, because its save was interrupted; {others}")
    if has_metadata:
        return
    if (directory / rank_name(0)).exists():
        raise CheckpointError(
            f"{name}: must be a checkpoint, but is a window of snapshots. tools/convert_checkpoint.py from-window "
            "writes a checkpoint from it"
        )
    if (directory / "config.json").is_file():
        raise CheckpointError(
            f"{name}: must be a checkpoint, but is a Hugging Face folder. tools/convert_checkpoint.py from-hf writes a "
            "checkpoint of its weights"
        )
    runs = sorted(path.parent.name for path in directory.glob("*/config.yaml"))
    if runs:
        raise CheckpointError(
            f"{name}: must be a checkpoint, but is a folder of runs ({', '.join(runs[:5])}); checkpoints of a run are "
            f"in {directory / runs[0] / 'checkpoints'}"
        )
    raise CheckpointError(f"{name}: contains no checkpoint: it has no {MANIFEST_NAME} and no .metadata")


def _newest_of(stored: Sequence[StoredCheckpoint]) -> str:
    complete = [entry.path for entry in stored if entry.complete]
    return f"its newest complete checkpoint is {complete[-1]}" if complete else "none of its checkpoints is complete"


def _newest_states(run_dir: Path) -> str:
    found = [entry.path for entry in list_checkpoints(run_dir / "checkpoints") if entry.complete]
    windows = run_dir / "windows"
    keys = WindowFolder(windows).list_windows() if windows.is_dir() else []
    newest = [
        f"{what} are in {folder}, the newest is {path}"
        for what, folder, path in (
            ("checkpoints", run_dir / "checkpoints", found[-1] if found else None),
            ("windows", windows, windows / window_name(keys[-1]) if keys else None),
        )
        if path is not None
    ]
    return "; its ".join(newest) if newest else "checkpoints/ and windows/ contain none yet"


def other_model(stored: Settings, present: Settings, *, keys: Sequence[str] | None = None) -> list[Difference]:
    """List the model's configuration keys whose values differ between two jobs. Compare only ``keys``; None means all
    keys that determine the shapes of weights or how outputs are computed from weights."""
    names = keys or _FUNCTION
    one, other = ({key: _normal(key, each.get("model", {})) for key in names} for each in (stored, present))
    return Difference.between({"model": one}, {"model": other})


_EQUAL_IF_NULL = {
    "model.num_query_groups": "model.num_attention_heads",
    "model.moe_ffn_hidden_size": "model.ffn_hidden_size",
}
"""Maps a configuration key to the key whose value is used if the value of the first key is null."""
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
        *("ffn_hidden_size", "max_position_embeddings", *YARN_KEYS),
    )
)
"""Keys of the model's configuration that determine the shapes of weights, or how outputs are computed from weights."""
_ONLY_OUTPUTS = ("rotary_base", "rotary_percent", "layernorm_epsilon", "activation", "moe_router_topk", "rope_type")
_ONLY_OUTPUTS += ("moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups", *YARN_KEYS)
_ONLY_OUTPUTS += ("moe_router_group_topk", "moe_router_topk_scaling_factor")
_SHAPES = tuple(key for key in _FUNCTION if key.removeprefix("model.") not in _ONLY_OUTPUTS)
"""Keys of the model's configuration that determine which tensors the model has, and their shapes."""


def _other_optimizer(stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[Difference]:
    """List the differing settings that give a checkpoint's optimizer other tensors than the job's optimizer has."""
    keys: list[str] = []
    if _master_weights(stored) != _master_weights(present):
        names = (_SHARDED, _DTYPE, _REGIME)
        keys += [name for name in names if stored.get(name) != present.get(name)]
    if stored.get(_FROZEN) != present.get(_FROZEN):
        keys.append(_FROZEN)
    return [Difference(concern="optimizer", key=key, stored=stored.get(key), present=present.get(key)) for key in keys]


_SHARDED, _DTYPE, _FROZEN = "parallel.use_distributed_optimizer", "precision.params_dtype", "training.frozen"
_REGIME = "precision.regime"


def _master_weights(optimizer: Mapping[str, Any]) -> str | None:
    """Return the name under which a checkpoint stores the master weights: ``precision.regime`` if the optimizer state
    is quantized, otherwise Megatron's name. Return None if the model's weights are the only master weights."""
    if optimizer.get(_REGIME) is not None:
        return str(optimizer[_REGIME])
    if optimizer.get(_SHARDED):
        return "param"
    return None if optimizer.get(_DTYPE) == "fp32" else "fp32_param"


def _normal(key: str, values: Mapping[str, Any]) -> Any:
    value = values.get(key)
    if value is None and key in _EQUAL_IF_NULL:
        return values.get(_EQUAL_IF_NULL[key])
    if value is None and key == "model.kv_channels" and values.get("model.num_attention_heads"):
        return values.get("model.hidden_size", 0) // values["model.num_attention_heads"]
    if key == "model.ffn_hidden_size" and not _has_dense_layers(values):
        return None
    if key == "model.max_position_embeddings":
        is_learned = values.get("model.position_embedding_type") == "learned_absolute"
        return value if is_learned else None  # other kinds of position embeddings have no weights
    return value


def _has_dense_layers(values: Mapping[str, Any]) -> bool:
    is_mixed = values.get("model.moe_layer_freq", 1) != 1 or values.get("model.moe_first_dense_layers", 0) > 0
    return values.get("model.num_moe_experts") is None or is_mixed


def other_checkpoint(
    path: Path, manifest: Manifest, settings: Settings, *, ignores_data: bool, allowed: Collection[str] = ()
) -> str | None:
    """Return an error text about the settings in which a checkpoint differs from the job; None if it does not differ.

    Args:
        allowed: keys that may differ (``run.allow_change``).
    """
    if manifest.format_version == 1:  # it has no settings
        return None
    found = _differences(manifest.settings, settings, ignores_data=ignores_data, allowed=allowed)
    if not found:
        return None
    only_data = all(each.concern == "data" for each in found)
    remedy = ". If the data were changed on purpose, set checkpoint.allow_other_data=true" if only_data else ""
    return (
        f"{path}: was written with other settings than this job has: {_listed(found)}. Resume "
        f"with its settings, or begin another run from its state: run.name=<another> checkpoint.load={path}{remedy}"
    )


def other_window(
    window: Window, where: str, settings: Settings, *, ignores_data: bool = False, allowed: Collection[str] = ()
) -> str | None:
    """Return an error text about the settings in which a window differs from the job; None if it does not differ.

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
        raise CheckpointError(f"{where}: its record of the job's settings is missing or damaged: {error!r}") from None
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
