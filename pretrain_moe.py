"""Entry point of training. It composes ``JobConfig`` from conf/ and the command line, then starts the ranks of the job,
or runs as a rank itself.

This file imports torch, Megatron and wandb only in a rank. Help, dry runs and configuration errors therefore take about
a second.
"""

import dataclasses
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft import __version__
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    CheckpointError,
    ConfigError,
    MegatronFtError,
    SeveralErrors,
)
from megatron_ft.installed import not_installed

if TYPE_CHECKING:
    import hydra_entry
    from megatron_ft.config.findings import Findings
    from megatron_ft.config.membership import JobInputs
    from megatron_ft.control.launchers.torchrun import RankEnvironment
    from megatron_ft.corpus.samples import DataSummary
    from megatron_ft.planning.devices import DeviceChoice, DeviceFacts
    from megatron_ft.planning.job import JobPlan

CONF = Path(__file__).resolve().parent / "conf"
_REQUIRED = (
    "hydra",
    "omegaconf",
    "yaml",
    "numpy",
    "scipy",
    "psutil",
    "grpc",
    "rich",
    "tokenizers",
    "torch",
    "megatron",
)
"""Packages without which no job can start."""
_REFUSAL_SECONDS = 30.0
"""Longest time that a rank waits until the launcher ends the rank. After this time, the rank reports the error."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line. Write each error to stderr as one line, without errors that only follow from others.
    Return the exit code; ``--help`` lists the codes."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not CONF.is_dir():
        print(
            f"error: {CONF}: must be the folder of the configuration groups; install the clone with pip install -e .",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _REQUIRED:
            raise
        print(not_installed(error), file=sys.stderr)
        return ConfigError.exit_code
    except MegatronFtError as error:
        if isinstance(error, (ConfigError, CheckpointError)) and _another_rank_reports():
            _wait_for_termination()
        for each in error.errors if isinstance(error, SeveralErrors) else (error,):
            print(f"error: {each}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted before ranks were started", file=sys.stderr)
        return EXIT_INTERRUPTED


def _another_rank_reports() -> bool:
    """Return whether this process is a rank, but not the first rank of its node. All ranks of a node get the same
    error, so only the first one reports it."""
    from megatron_ft.control.launchers.torchrun import detect

    local_rank = {"torchrun": "LOCAL_RANK", "srun": "SLURM_LOCALID"}.get(detect(os.environ))
    return local_rank is not None and os.environ.get(local_rank, "0") != "0"


def _wait_for_termination() -> None:
    """Wait for the launcher to end this rank.

    The launcher ends all ranks when one of them has ended. Only the first rank of a node prints the error, so another
    rank must not end before it. If the launcher does not end this rank within ``_REFUSAL_SECONDS``, this function
    returns, and this rank prints the error, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process without a message, as SIGTERM does
    threading.Event().wait(_REFUSAL_SECONDS)


def compose(overrides: list[str]) -> tuple[JobConfig, str]:
    """Compose the configuration from conf/ and ``overrides``. Return it as ``JobConfig`` and as YAML text.

    Raises:
        ConfigError: a key, group or option is unknown, a value has the wrong type, or an override violates Hydra's
            grammar.
    """
    from hydra_entry import Options, compose

    return compose(Options(conf=CONF, overrides=tuple(overrides)))


def _run(arguments: list[str]) -> int:
    if any(argument in ("-h", "--help") for argument in arguments):
        from megatron_ft.config.help import help_text

        print(help_text(CONF))
        return EXIT_OK
    if "--version" in arguments:
        print(f"megatron-ft {__version__}")
        return EXIT_OK
    import hydra_entry

    options = hydra_entry.Options.parse(arguments, CONF)
    if hydra_entry.answer(options):
        return EXIT_OK
    if hydra_entry.is_sweep(options):
        from megatron_ft.control.launchers.torchrun import detect

        hydra_entry.check_not_a_rank(detect(os.environ))
        return hydra_entry.run_sweep(options, Path(__file__))
    from megatron_ft.config.findings import Findings

    found = Findings()
    composed = hydra_entry.compose_accepted(options, found)
    if composed is None:
        found.raise_errors()
    assert composed is not None, "a command without errors has a configuration"
    config, config_yaml, options = composed
    if (run_dir := _known_run(config)) is not None:
        try:
            config, config_yaml = _continue_run(run_dir, config, config_yaml, options)
        except MegatronFtError as error:  # without its configuration, nothing else of the run can be checked
            found.add(error)
            found.raise_errors()
    return _start(config, config_yaml, list(options.overrides), found)


def _continue_run(
    run_dir: Path, config: JobConfig, config_yaml: str, options: "hydra_entry.Options"
) -> tuple[JobConfig, str]:
    """Return the configuration with which the run in ``run_dir`` continues, as ``JobConfig`` and as YAML text. It is
    the configuration of the run's newest job, changed by the overrides of the command line. Print the changed keys.

    Raises:
        ConfigError: an override changes what the run trains, and ``run.allow_change`` does not list its key.
        DataError: the configuration of the newest job cannot be read.
    """
    import hydra_entry
    from megatron_ft.config.remembered import changes, check_allowed, check_names, continued
    from megatron_ft.control.launchers.torchrun import detect
    from megatron_ft.control.rundir import CONFIG_NAME, read_run_config

    if not (run_dir / CONFIG_NAME).exists():
        _note(f"{run_dir} has no {CONFIG_NAME}, so only the keys that are given on the command line are set")
        return config, config_yaml
    recorded = read_run_config(run_dir, as_given=True)
    defaults, _ = hydra_entry.compose(dataclasses.replace(options, overrides=()))
    named = hydra_entry.named_keys(options)
    now = continued(recorded, config, defaults, named)
    if now.launch.mode in ("torchrun", "srun") and "launch.mode" not in named:
        # The newest job may have had another launcher than this job.
        now = dataclasses.replace(now, launch=dataclasses.replace(now.launch, mode=detect(os.environ)))
    found = changes(recorded, now)
    check_names(config.run.allow_change, now)
    allowed = check_allowed(found, config.run.allow_change)
    # Keys that earlier jobs were allowed to change stay allowed: the newest checkpoint may be older than the change.
    allowed = list(dict.fromkeys([*recorded.run.allow_change, *allowed]))
    now = dataclasses.replace(now, run=dataclasses.replace(now.run, allow_change=allowed))
    text = "; ".join(map(str, found))
    _note(f"{run_dir.name} continues with its configuration ({CONFIG_NAME}){f'; changed: {text}' if found else ''}")
    return now, hydra_entry.to_yaml(now)


def _note(text: str) -> None:
    """Print a note. If this process is a rank, print it only on the first rank of the node."""
    if not _another_rank_reports():
        print(f"note: {text}", file=sys.stderr)


def _reached_end(config: JobConfig) -> str | None:
    """Return a note if the continued run already has a complete checkpoint of its last iteration, otherwise None."""
    from megatron_ft.snapshot.storage.checkpoints import list_checkpoints

    run_dir = _known_run(config)
    if run_dir is None or config.training.evaluate_only:
        return None
    iterations = [stored.iteration for stored in list_checkpoints(run_dir / "checkpoints") if stored.complete]
    last = config.training.train_iterations
    if not iterations or max(iterations) < last:
        return None
    return (
        f"nothing to do: {run_dir.name} has trained {max(iterations)} of {last} iterations "
        f"(training.train_iterations={last}). To train it further, set a larger number"
    )


def _start(config: JobConfig, config_yaml: str, overrides: list[str], found: "Findings") -> int:
    environment = None
    if not config.dry_run:
        with found.collecting():
            environment = _environment(config, overrides)
            if environment is not None:
                config = _adopt(config, environment, overrides)
                environment.check_restarts(config.run)
    given = config
    from megatron_ft.config.batch_size import with_train_iterations

    with found.collecting():
        config = with_train_iterations(config)
    if config.training.train_iterations != given.training.train_iterations:
        config_yaml = _with_values(config_yaml, {"training.train_iterations": config.training.train_iterations})
    if not found:
        config, config_yaml = read_failure_domains(config, config_yaml)
    with found.collecting():
        config, config_yaml = _choose_checkpoint(config, config_yaml)
    from megatron_ft.telemetry import check_sinks

    with found.collecting():
        check_sinks(config)
    facts = observe_here(asks_memory=not config.dry_run and not _another_rank_reports())
    inspected = _inspect(config, facts, found, may_be_elsewhere=config.dry_run)
    _check_source(inspected, found)
    if not config.dry_run:
        from megatron_ft.doctor.start import check_this_machine

        check_this_machine(inspected.on_its_device, found)
    found.raise_errors()
    plan = inspected.plan()
    _check_resume(config, plan.data)
    if config.dry_run:
        from megatron_ft.doctor.start import with_compiler_note

        _show(with_compiler_note(plan, config), config)
        if (end := _reached_end(config)) is not None:
            _note(end)
        return EXIT_OK
    from megatron_ft.doctor.start import check_host_memory

    config, config_yaml = _decide(config, config_yaml, plan)
    check_host_memory(config, plan)
    if not _another_rank_reports():
        for note in plan.notes:
            print(f"note: {note}", file=sys.stderr)
    from megatron_ft.config.membership import derive_placement

    config = derive_placement(config)
    if (end := _reached_end(config)) is not None:
        _note(end)
        return EXIT_OK
    if environment is not None:
        from megatron_ft.mcore import standalone

        return standalone.main(config, environment)
    from megatron_ft.config.remembered import with_given_values
    from megatron_ft.control.launcher import launch
    from megatron_ft.telemetry import open_sinks

    config_yaml = with_given_values(config_yaml, given, config)
    sidecars = {} if config.snapshot.policy is None else {"keeper": "megatron_ft.snapshot.server"}
    return launch(config, config_yaml, open_sinks=open_sinks, sidecars=sidecars)


def _known_run(config: JobConfig) -> Path | None:
    """Return the folder of the run that the job continues; None for a new run."""
    from megatron_ft.control.rundir import RUN_ID_NAME

    if config.run.name is None or config.run.resume == "never":
        return None
    run_dir = Path(config.run.dir).absolute() / config.run.name
    return run_dir if (run_dir / RUN_ID_NAME).exists() else None


def _choose_checkpoint(config: JobConfig, config_yaml: str) -> tuple[JobConfig, str]:
    """Replace a folder of Megatron-LM in ``checkpoint.load`` or ``checkpoint.load_weights`` by the newest checkpoint in
    this folder, so that all ranks load the same checkpoint. Return the configuration as ``JobConfig`` and as YAML.

    Raises:
        CheckpointError: the newest checkpoint of the folder cannot be determined or loaded.
    """
    from megatron_ft.snapshot.storage.checkpoints import MEGATRON_LATEST_NAME, newest_of_megatron

    for name in ("load", "load_weights"):
        folder = getattr(config.checkpoint, name)
        newest = None if folder is None or _known_run(config) is not None else newest_of_megatron(Path(folder))
        if newest is None:
            continue
        if not _another_rank_reports():
            print(
                f"note: checkpoint.{name}={folder}: is a folder of Megatron-LM; its newest checkpoint is "
                f"{newest.name}, as {MEGATRON_LATEST_NAME} says",
                file=sys.stderr,
            )
        checkpoint = dataclasses.replace(config.checkpoint, **{name: str(newest)})
        config = dataclasses.replace(config, checkpoint=checkpoint)
        config_yaml = _with_values(config_yaml, {f"checkpoint.{name}": str(newest)})
    return config, config_yaml


def _check_source(inspected: "_Inspected", found: "Findings") -> None:
    """Check the checkpoint of ``checkpoint.load`` or ``checkpoint.load_weights`` from which a new run would start. The
    models of checkpoint and job are compared only if the job has no errors. Errors are added to ``found``."""
    config, data = inspected.config, inspected.data
    checkpoint, run_dir = config.checkpoint, _known_run(config)
    source = checkpoint.load or checkpoint.load_weights
    if run_dir is not None:
        return
    with found.collecting():
        if source is not None:
            from megatron_ft.config.identity import settings_of
            from megatron_ft.snapshot.storage.run_settings import check_source

            model = None
            if data is not None and not found:
                model = settings_of(config, data_fingerprint="", vocab_size=data.vocab_size)
            check_source(Path(source), model, weights_only=checkpoint.load is None, trust=checkpoint.trust)
        elif config.training.evaluate_only and not found:
            raise CheckpointError(
                f"training.evaluate_only=true: {Path(config.run.dir).absolute() / str(config.run.name)} contains no "
                "run, so there is no saved state"
            )


def _check_resume(config: JobConfig, data_summary: "DataSummary") -> None:
    """Check that a resumed run has the settings with which its state was saved. This happens before the job claims the
    run's folder or starts a rank. A dry run does not compare the training data, because it does not index them.

    Raises:
        CheckpointError: settings differ; the message names each key.
    """
    from megatron_ft.control.rundir import RunId

    run_dir = _known_run(config)
    if run_dir is None:
        return
    from megatron_ft.config.identity import JobIdentity, settings_of
    from megatron_ft.corpus.samples import SplitPlan
    from megatron_ft.corpus.tokenizers import build_tokenizer
    from megatron_ft.snapshot.storage.run_settings import check_same_settings
    from megatron_ft.snapshot.storage.window_folder import WindowFolder

    known = RunId.read(run_dir)
    data = None
    if not config.dry_run:
        split = SplitPlan.of(config.data, config.model.seq_length, "train", build_tokenizer(config.data))
        data = split.fingerprint()
    identity = JobIdentity(
        run_id=known.run_id,
        run_name=run_dir.name,
        settings=settings_of(config, data_fingerprint=data or "", vocab_size=data_summary.vocab_size),
        allow_change=tuple(config.run.allow_change),
        takes_format_1=known.is_older,
    )
    # Windows in an object store are not compared here. The ranks open the store later, and compare them then.
    is_remote = "://" in (config.snapshot.persist_url or "").removeprefix("file://")
    windows = None if is_remote else WindowFolder.of_run(config, run_dir)
    check_same_settings(
        run_dir,
        identity,
        windows=windows,
        compares_data=data is not None,
        allow_other_data=config.checkpoint.allow_other_data,
    )


def read_failure_domains(config: JobConfig, config_yaml: str) -> tuple[JobConfig, str]:
    """Read the failure domains from Slurm if the configuration requests this. Return the configuration as ``JobConfig``
    and as YAML text. A dry run does not query Slurm, because Slurm may not have allocated nodes yet.

    Raises:
        ConfigError: Slurm does not report the domains, or the configuration has an error that does not depend on the
            domains.
    """
    if config.topology.failure_domain_source == "listed" or config.dry_run:
        return config, config_yaml
    from megatron_ft.config.validate import validate
    from megatron_ft.control.slurm.topology import summary, with_failure_domains

    validate(config)
    config = with_failure_domains(config, os.environ)
    print(f"note: {summary(config)}", file=sys.stderr)
    names = ("failure_domain_source", "failure_domains")
    return config, _with_values(config_yaml, {f"topology.{name}": getattr(config.topology, name) for name in names})


def _environment(config: JobConfig, overrides: list[str]) -> "RankEnvironment | None":
    """Return the ``RankEnvironment`` of this process if torchrun or srun started it. Return None otherwise, or if the
    command line chooses ``launch=local``.

    Raises:
        ConfigError: the environment variables of the chosen launch mode are not set.
    """
    from megatron_ft.control.launchers.torchrun import RankEnvironment, detect

    chosen = bool({"launch", "launch.mode"} & _keys(overrides)) or config.launch.mode != "local"
    mode = config.launch.mode if chosen else detect(os.environ)
    if mode not in ("torchrun", "srun"):
        return None
    if detect(os.environ) == "local":
        raise ConfigError.of("launch.mode", mode, f"must be local, because this process was not started by {mode}")
    return RankEnvironment.read(mode, os.environ, master_port=config.launch.master_port)


def _adopt(config: JobConfig, environment: "RankEnvironment", overrides: list[str]) -> JobConfig:
    """Set the launch mode and the numbers of nodes and ranks to the values of the launcher that started this process.
    If the command line sets one of these values, it must be the same."""
    mode, num_nodes, per_node = environment.launcher, environment.num_nodes, environment.local_world_size
    found: dict[str, Any] = {"mode": mode, "num_nodes": num_nodes, "ranks_per_node": per_node}
    for name, value in found.items():
        key, given = f"launch.{name}", getattr(config.launch, name)
        if key in _keys(overrides) and given != value:
            raise ConfigError.of(key, given, f"must be {value}, the value of {mode}, which started this process")
    if environment.rank == 0:
        print(environment.summary(), file=sys.stderr)
    return dataclasses.replace(config, launch=dataclasses.replace(config.launch, **found))


def _keys(overrides: list[str]) -> set[str]:
    return {text.partition("=")[0].lstrip("+") for text in overrides}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Inspected:
    """A checked configuration, its device and the contents of its files. A field is None after an error."""

    config: JobConfig
    """Configuration in which the keys that cause errors have their default values."""
    facts: "DeviceFacts"
    refused: dict[str, str]
    choice: "DeviceChoice | None"
    data: "DataSummary | None"
    inputs: "JobInputs | None"

    @property
    def on_its_device(self) -> JobConfig:
        """Return the configuration with the chosen device; unchanged if no device could be chosen."""
        from megatron_ft.config.validate import on_device

        return self.config if self.choice is None else on_device(self.config, self.choice.device)

    def plan(self) -> "JobPlan":
        """Plan the job of a configuration without errors.

        Raises:
            ConfigError: the job cannot run.
        """
        from megatron_ft.doctor.start import with_gpu_memory
        from megatron_ft.planning.job import JobPlan, with_prebuilt_parts, with_slots

        config, choice, data = self.config, self.choice, self.data
        assert choice is not None and data is not None, "a configuration without errors has a device and data"
        # These two numbers depend only on the configuration, so a dry run on another machine gives the same numbers.
        derived, reason = with_slots(self.on_its_device, choice.device, lambda: data)
        derived, prebuilt_reason = with_prebuilt_parts(derived, choice.device, lambda: data)
        return JobPlan.of(
            with_gpu_memory(derived, self.facts),
            data,
            self.inputs,
            device=choice.device,
            with_losses=config.dry_run,
            given=config if config.dry_run else None,
            choice=choice,
            refused=self.refused,
            slots_reason=reason,
            prebuilt_reason=prebuilt_reason,
            memory_is_of_this_machine=config.limits.gpu_memory_bytes is None,
        )


def _inspect(config: JobConfig, facts: "DeviceFacts", found: "Findings", *, may_be_elsewhere: bool) -> _Inspected:
    """Check a configuration, choose the device, and read the files that it names. Errors are added to ``found``.

    After an error, the built-in corpus is not indexed, because this would take seconds.
    """
    from megatron_ft.config.findings import find_errors
    from megatron_ft.config.validate import CHECKS

    config = find_errors(config, CHECKS, found)
    from megatron_ft.config.membership import JobInputs  # after the checks, so that errors are reported quickly
    from megatron_ft.config.validate import on_device, refused_devices
    from megatron_ft.corpus.samples import check_data
    from megatron_ft.doctor.start import check_gpus
    from megatron_ft.planning.devices import DeviceChoice

    refused = refused_devices(config)
    choice = data = inputs = None
    with found.collecting():
        choice = DeviceChoice.of(
            config.training.device,
            facts,
            gpu_memory_bytes=config.limits.gpu_memory_bytes,
            refused=refused,
            may_be_elsewhere=may_be_elsewhere,
        )
    if choice is not None and not config.dry_run and not may_be_elsewhere:
        with found.collecting():  # before data are read and indexed
            check_gpus(on_device(config, choice.device), facts)
    with found.collecting(at_fault=()):
        data = check_data(dataclasses.replace(config, dry_run=True) if found else config)
    with found.collecting(at_fault=()):
        inputs = JobInputs.read(config)
    return _Inspected(config=config, facts=facts, refused=refused, choice=choice, data=data, inputs=inputs)


def resolve_plan(config: JobConfig, *, facts: "DeviceFacts | None" = None, may_be_elsewhere: bool = True) -> "JobPlan":
    """Validate a composed configuration, read the files that it names, choose the device, and plan the job.

    Args:
        facts: Devices of this machine. If None, the function detects them.
        may_be_elsewhere: Whether ranks may run on other machines, whose devices are unknown. With
            ``training.device=auto`` on a machine without a GPU, the job may then be planned for either device.

    Raises:
        ConfigError: the job cannot run. DataError: a file is missing or damaged. SeveralErrors: there are several
            errors.
    """
    from megatron_ft.config.findings import Findings

    found = Findings()
    inspected = _inspect(config, facts or observe_here(), found, may_be_elsewhere=may_be_elsewhere)
    found.raise_errors()
    return inspected.plan()


def observe_here(*, asks_memory: bool = False) -> "DeviceFacts":
    """Detect the devices that this process may use and, with ``asks_memory``, the memory of each GPU."""
    from megatron_ft.doctor.devices import observe_devices

    return observe_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), asks_memory=asks_memory)


def _decide(config: JobConfig, config_yaml: str, plan: "JobPlan") -> tuple[JobConfig, str]:
    """Set ``training.device``, ``placement.num_slots_per_rank`` and ``nodes.num_prebuilt_parts`` to the values of
    ``plan``, so that ranks use what the plan describes. Return the configuration as ``JobConfig`` and as YAML text."""
    from megatron_ft.config.validate import on_device

    values: dict[str, Any] = {}
    if config.training.device != plan.device:
        config = on_device(config, plan.device)
        values["training.device"] = plan.device
    if config.placement.num_slots_per_rank != plan.num_slots_per_rank:
        placement = dataclasses.replace(config.placement, num_slots_per_rank=plan.num_slots_per_rank)
        config = dataclasses.replace(config, placement=placement)
        values["placement.num_slots_per_rank"] = plan.num_slots_per_rank
    if config.nodes.num_prebuilt_parts != plan.num_prebuilt_parts:
        nodes = dataclasses.replace(config.nodes, num_prebuilt_parts=plan.num_prebuilt_parts)
        config = dataclasses.replace(config, nodes=nodes)
        values["nodes.num_prebuilt_parts"] = plan.num_prebuilt_parts
    return config, _with_values(config_yaml, values) if values else config_yaml


def _with_values(config_yaml: str, values: dict[str, Any]) -> str:
    from omegaconf import OmegaConf

    tree = OmegaConf.create(config_yaml)
    for key, value in values.items():
        OmegaConf.update(tree, key, value)
    return OmegaConf.to_yaml(tree, resolve=True)


def _show(plan: "JobPlan", config: JobConfig) -> None:
    from megatron_ft.planning.render import render

    print(json.dumps(plan.to_json(), indent=2) if config.dry_run_format == "json" else render(plan))


if __name__ == "__main__":
    sys.exit(main())
