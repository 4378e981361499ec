"""Composes the configuration with Hydra, executes Hydra's command-line options, and runs the jobs of a sweep.

Only this file and ``tools/`` use Hydra. This file imports neither torch nor Megatron.
"""

import contextlib
import datetime
import json
import logging
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ft.config.findings import Findings, keys_in
from megatron_ft.config.job import JobConfig
from megatron_ft.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, SeveralErrors

_NO_EFFECT = {
    "hydra.run": "run.dir and run.name set the folder of a run",
    "hydra.sweep": "each job of a sweep is a run of its own, in run.dir",
    "hydra.output_subdir": "a run's folder contains its configuration as config.yaml",
    "hydra.job.chdir": "the job runs in the folder in which it is started",
    "hydra.launcher": "the jobs of a sweep run one after the other on this machine; the group launch starts the ranks",
    "hydra.callbacks": "there are no callbacks; telemetry.sinks receive what a job reports",
    "hydra.job_logging": "logs are in the run's folder",
    "hydra.hydra_logging": "logs are in the run's folder",
}
"""Maps each key of Hydra that would have no effect to a text: the key to use instead, or the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A parsed command line: Hydra's options, and overrides."""

    conf: Path
    """Folder of the configuration groups (``--config-path``)."""
    overrides: tuple[str, ...] = ()
    config_name: str = "config"
    config_dir: Path | None = None
    """Additional folder of configuration groups, for example with experiments outside the clone."""
    cfg: str | None = None
    """Part of the configuration to print: ``job``, ``hydra`` or ``all``."""
    resolve: bool = False
    package: str | None = None
    info: str | None = None
    hydra_help: bool = False
    multirun: bool = False
    shell_completion: bool = False

    @classmethod
    def parse(cls, arguments: Sequence[str], conf: Path) -> "Options":
        """Parse a command line with Hydra's own parser.

        Raises:
            ConfigError: an option is unknown, or its value is wrong.
        """
        if not any(argument.startswith("-") for argument in arguments):
            return cls(conf=conf, overrides=tuple(arguments))
        parser = _parser()
        known, extra = parser.parse_known_args(list(arguments))
        if any(word.startswith("-") for word in extra):
            from megatron_ft.config.megatron_lm import check_flags

            try:
                check_flags([word for word in arguments if word not in parser._option_string_actions])
            except ConfigError as error:
                given = tuple(word for word in (*known.overrides, *extra) if "=" in word and not word.startswith("-"))
                _, wrong = _divide(cls(conf=conf, overrides=given))
                if not wrong:
                    raise
                raise SeveralErrors([error, *(other for other, _ in wrong)]) from None
        if known.experimental_rerun:
            raise ConfigError(f"--experimental-rerun={known.experimental_rerun}: must be left out; use run.resume")
        folders = {}
        for name in ("config_path", "config_dir"):
            if given := getattr(known, name):
                folders[name] = Path(given).absolute()
                if not folders[name].is_dir():
                    raise ConfigError(f"--{name.replace('_', '-')}={given}: must be a folder that exists")
        return cls(
            conf=folders.get("config_path", conf),
            overrides=(*known.overrides, *extra),
            config_name=(known.config_name or "config").removesuffix(".yaml"),
            config_dir=folders.get("config_dir"),
            cfg=known.cfg,
            resolve=known.resolve,
            package=known.package,
            info=known.info,
            hydra_help=known.hydra_help,
            multirun=known.multirun,
            shell_completion=known.shell_completion,
        )

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders that contain configuration groups: ``conf`` and, if given, ``config_dir``."""
        return (self.conf,) if self.config_dir is None else (self.conf, self.config_dir)

    def words(self, overrides: Sequence[str]) -> list[str]:
        """Return the command line of a job with ``overrides``, and with the configuration files of these options."""
        own = [f"--config-path={self.conf}", f"--config-name={self.config_name}"]
        own += [f"--config-dir={self.config_dir}"] if self.config_dir is not None else []
        return [*own, *overrides]


def _parser() -> Any:
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> None:
        raise ConfigError(f"{message}; --hydra-help lists Hydra's options")

    parser = get_args_parser()
    parser.prog = "pretrain_moe.py"
    parser.allow_abbrev = False
    parser.error = refuse
    # Hydra's text for this option is not a string, which argparse of newer Python versions does not accept.
    parser._option_string_actions["--shell-completion"].help = "Print the shell's code, with install=bash (zsh, fish)"
    return parser


def answer(options: Options) -> bool:
    """Execute an option that prints something and starts no job. Return False if no such option is given.

    Raises:
        ConfigError: the configuration cannot be composed, or an option has a wrong value.
    """
    if options.hydra_help:
        print(_parser().format_help())
        return True
    if options.shell_completion:
        _complete(options)
        return True
    if options.info is None and options.cfg is None:
        if options.resolve or options.package is not None:
            raise ConfigError("--resolve, --package: must be used with --cfg; add --cfg job")
        return False
    if options.info is not None:
        known, _ = _checked(options)
        root = logging.getLogger()
        before = root.level, root.handlers[:]
        try:  # to print, Hydra changes the root logger
            with _errors(known), _initialized(options) as hydra:
                hydra.show_info(options.info, config_name=options.config_name, overrides=list(known.values()))
        finally:
            root.setLevel(before[0])
            root.handlers[:] = before[1]
        return True
    _show(options)
    return True


def _complete(options: Options) -> None:
    with _initialized(options) as hydra:
        try:
            hydra.shell_completion(config_name=options.config_name, overrides=list(options.overrides))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"--shell-completion {' '.join(options.overrides)}: must be followed by install=bash, uninstall=bash "
                f"or, in the shell's own calls, query=bash (also zsh and fish): {error}"
            ) from None


def _show(options: Options) -> None:
    """Print the composed configuration as YAML."""
    from omegaconf import OmegaConf

    tree, hydra_node, _ = _composed(options)
    shown: Any = {"job": tree, "hydra": OmegaConf.create({"hydra": hydra_node})}.get(options.cfg or "")
    if shown is None:
        shown = OmegaConf.merge({"hydra": hydra_node}, tree)
    if options.package is not None:
        part = OmegaConf.select(shown, options.package)
        if part is None:
            raise ConfigError(f"--package={options.package}: must be a key of the configuration")
        print(f"# @package {options.package}")
        shown = part if OmegaConf.is_config(part) else OmegaConf.create({options.package: part})
    print(OmegaConf.to_yaml(shown, resolve=options.resolve), end="")


def compose(options: Options) -> tuple[JobConfig, str]:
    """Compose the configuration. Return it as ``JobConfig`` and as YAML text.

    Raises:
        ConfigError: a key, group or option is unknown, a value has the wrong type, or an override violates Hydra's
            grammar.
    """
    from omegaconf import OmegaConf

    tree, _, known = _composed(options)
    with _errors(known):
        config = OmegaConf.to_object(tree)
        if not isinstance(config, JobConfig):
            raise ConfigError(
                f"--config-name={options.config_name}: must compose all keys; begin its defaults with '- config'"
            )
        return config, OmegaConf.to_yaml(tree, resolve=True)


def compose_accepted(options: Options, found: Findings) -> tuple[JobConfig, str, Options] | None:
    """Compose the configuration from the overrides that have no error. Add the errors of other overrides to ``found``.

    Returns:
        The configuration as ``JobConfig`` and as YAML text, and the options with the accepted overrides. None if no
        configuration can be composed, or if ``experiment`` has a wrong option, so that many keys are unknown.
    """
    try:
        return *compose(options), options
    except ConfigError:
        accepted, wrong = _divide(options)
    composed = None
    while composed is None:
        rest = replace(options, overrides=tuple(accepted))
        try:
            composed = compose(rest)
        except ConfigError as error:
            wrong.append((error, keys_in(error)))
            due_to = _due_to(error, accepted)
            if due_to is None:  # no override is at fault, but a file
                break
            del accepted[due_to]
    # Report the errors of all overrides. A key that an error suggests does not make another error a consequence.
    for each, _ in wrong:
        found.add(each, at_fault=())
    found.blame(key for _, keys in wrong for key in keys)
    if composed is None or any("experiment" in keys for _, keys in wrong):
        return None
    return *composed, rest


def _divide(options: Options) -> tuple[dict[str, Any], list[tuple[ConfigError, list[str]]]]:
    """Check each override alone.

    Returns:
        A mapping from the text of each override without an error to the parsed override. A list of the errors of all
        other overrides, each with the keys or groups that the override sets, and that the error names.
    """
    from omegaconf import OmegaConf

    from megatron_ft.config.overrides import open_key

    tree = OmegaConf.structured(JobConfig)
    accepted: dict[str, Any] = {}
    wrong: list[tuple[ConfigError, list[str]]] = []
    for text in options.overrides:
        keys: list[str] = []
        try:
            (override,) = _parse((text,))
            keys = [override.key_or_group]
            _checked(replace(options, overrides=(text,)))
            value = None if override.is_sweep_override() else override.value()
            # Types are not checked for options of groups, and for entries of mappings that accept any key.
            is_value = "." in keys[0] or isinstance(value, dict)
            if is_value and keys[0].partition(".")[0] in tree and open_key(keys[0]) in (None, keys[0]):
                with _errors({keys[0]: text}):
                    OmegaConf.update(tree, keys[0], value, merge=True)
            accepted[text] = override
        except ConfigError as error:
            wrong.append((error, [*keys, *keys_in(error)]))
    return accepted, wrong


def _due_to(error: ConfigError, overrides: dict[str, Any]) -> str | None:
    """Return the override that sets a key which ``error`` names, or the key's group. Return None if there is none."""
    for key in keys_in(error):
        for name in (key, key.partition(".")[0]):
            for text, override in overrides.items():
                if override.key_or_group == name:
                    return text
    return None


def to_yaml(config: JobConfig) -> str:
    """Return a configuration as YAML text."""
    from omegaconf import OmegaConf

    from megatron_ft.config.serialize import to_dict

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def named_keys(options: Options) -> list[str]:
    """Return the keys and groups that the overrides set, without Hydra's own keys."""
    return [each.key_or_group for each in _parse(options.overrides) if not _is_hydras(each)]


def _composed(options: Options) -> tuple[Any, Any, dict[str, str]]:
    """Return the composed configuration, Hydra's own configuration, and the overrides that Hydra applied, by key."""
    from omegaconf import OmegaConf, open_dict

    from megatron_ft.config.overrides import open_key

    known, fields = _checked(options)
    with _errors({**known, **fields}), _initialized(options):
        from hydra import compose as compose_with_hydra

        tree = compose_with_hydra(options.config_name, overrides=list(known.values()), return_hydra_config=True)
        with open_dict(tree):
            hydra_node = tree.pop("hydra")
        OmegaConf.set_struct(tree, False)
        # ``fields`` are entries of mappings that accept any key. Hydra's overrides cannot add such entries.
        for key, value in fields.items():
            mapping = open_key(key)
            if OmegaConf.select(tree, mapping) is None and (key != mapping or isinstance(value, dict)):
                OmegaConf.update(tree, mapping, {}, merge=False)
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
    return tree, hydra_node, known


def _checked(options: Options, *, allows_sweeps: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    """Check the overrides. Return two mappings: from each key that Hydra sets to the text of its override, and from
    each entry of a mapping that accepts any key (``open_key``) to its value."""
    from megatron_ft.config.overrides import check_moved, check_override, open_key

    parsed = _parse(options.overrides)
    pairs = list(zip(options.overrides, parsed, strict=True))
    check_moved((override.key_or_group, text) for text, override in pairs if not override.is_delete())
    texts: dict[str, str] = {}
    fields: dict[str, Any] = {}
    for text, override in pairs:
        key = override.key_or_group
        sweeps = override.is_sweep_override()
        value = override.get_value_string() if sweeps else override.value()
        if _is_hydras(override):
            _check_hydra(key, value)
        else:
            is_swept = sweeps and allows_sweeps  # swept values are checked when the jobs are composed
            shown = None if is_swept else value
            check_override(key, shown, *options.folders, deletes=override.is_delete(), sweeps=sweeps and not is_swept)
        if open_key(key):
            fields[key] = value
        else:
            texts[key] = text
    return texts, fields


def _check_hydra(key: str, value: Any) -> None:
    dotted = key.replace("/", ".")
    for name, instead in _NO_EFFECT.items():
        if dotted == name or dotted.startswith(f"{name}."):
            raise ConfigError.of(key, value, f"is not a known key here, because it would have no effect: {instead}")


def _parse(overrides: Sequence[str], loader: Any = None) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    parser = OverridesParser.create(config_loader=loader)
    parsed = []
    for text in overrides:
        try:
            parsed.extend(parser.parse_overrides([text]))
        except OverrideParseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"{text}: must be key=value in Hydra's grammar ({reason}); quote special characters: 'key=\"a b\"'"
            ) from None
    return parsed


@contextlib.contextmanager
def _initialized(options: Options) -> Iterator[Any]:
    """Yield a Hydra object that uses the folders of ``options``. Restore Hydra's global state after the block."""
    import hydra
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    ConfigStore.instance().store(name="job_schema", node=JobConfig)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(options.conf), job_name="pretrain_moe"):
        if options.config_dir is not None:
            search_path = create_config_search_path(str(options.conf))
            search_path.prepend("command-line", f"file://{options.config_dir}", anchor="schema")
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2(task_name="pretrain_moe", config_search_path=search_path)
        yield GlobalHydra.instance().hydra


@contextlib.contextmanager
def _errors(given: dict[str, Any]) -> Iterator[None]:
    """Convert Hydra's errors in the block to ``ConfigError``. ``given`` maps a key to its override, or to its value."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from megatron_ft.config.overrides import explain

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        values = {}
        for key, each in given.items():
            (override,) = _parse([each]) if isinstance(each, str) and "=" in each else (None,)
            values[key] = each if override is None or override.is_sweep_override() else override.value()
        raise explain(error, values) from error


# Sweeps


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """One job of a sweep."""

    overrides: tuple[str, ...]
    """All overrides of the job, including ``run.name``."""
    swept: tuple[str, ...]
    """The overrides in which jobs of the sweep differ."""
    config: JobConfig

    @property
    def run_dir(self) -> Path:
        """Return the folder of the job's run."""
        return Path(self.config.run.dir) / str(self.config.run.name)


def is_sweep(options: Options) -> bool:
    """Return whether the command line asks for a sweep: ``--multirun`` or ``hydra.mode=MULTIRUN``."""
    return options.multirun or any(text.replace(" ", "") == "hydra.mode=MULTIRUN" for text in options.overrides)


def sweep_jobs(options: Options) -> list[SweepJob]:
    """Return a job for each combination of swept values, like Hydra's basic sweeper. The last swept key varies fastest.

    Raises:
        ConfigError: an override is wrong, another sweeper is chosen, or two jobs would have the same run folder.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    with _initialized(options) as hydra:  # the loader lists the options that glob() matches
        loader = hydra.config_loader
    parsed = _parse(options.overrides, loader)
    plain = [text for text, each in zip(options.overrides, parsed, strict=True) if not each.is_sweep_override()]
    _checked(options, allows_sweeps=True)
    _, own, _ = _composed(replace(options, overrides=tuple(plain)))
    target = own.sweeper.get("_target_", "")
    if not target.endswith("basic_sweeper.BasicSweeper"):
        raise ConfigError.of("hydra/sweeper", target, "must be basic, the only sweeper that is supported")
    params = [f"{key}={value}" for key, value in (own.sweeper.params or {}).items()]
    parsed = [each for each in (*_parse(params, loader), *parsed) if not _is_hydras(each)]
    try:
        (combinations,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise ConfigError(f"{' '.join(options.overrides)}: {error}") from None
    swept_keys = {each.get_key_element() for each in parsed if each.is_sweep_override()}
    passed = [text for text in plain if text.startswith("hydra.searchpath=")]
    stamp = f"multirun-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}"
    names = [text for text in options.overrides if text.startswith("run.name=")]
    is_named_by_job = "run.name" in swept_keys or "${" in "".join(names)
    jobs = []
    for number, words in enumerate(combinations):
        swept = tuple(word for word in words if word.partition("=")[0] in swept_keys)
        config, _ = compose(replace(options, multirun=False, overrides=(*passed, *words)))
        if config.run.name is None or not is_named_by_job:
            words = [*words, f"run.name={config.run.name or stamp}-{number}"]
            config, _ = compose(replace(options, multirun=False, overrides=(*passed, *words)))
        jobs.append(SweepJob(overrides=(*passed, *words), swept=swept, config=config))
    folders = [job.run_dir for job in jobs]
    if len(set(folders)) < len(folders):
        remedy = "leave it out, or name each job after the swept keys, e.g. 'run.name=lr${optimizer.lr}'"
        raise ConfigError(f"run.name: must not be the same for two jobs of the sweep; {remedy}")
    return jobs


def _is_hydras(override: Any) -> bool:
    return override.key_or_group.replace("/", ".").split(".")[0] == "hydra"


def run_sweep(options: Options, script: Path) -> int:
    """Run the jobs of a sweep one after the other, each as a process of its own, and print one table at the end.

    A configuration that is refused ends the sweep before the first job starts. After a job fails, the next jobs still
    run. A signal ends the running job as usual, and no further job starts.

    Returns:
        Exit code of an interrupted job after a signal, otherwise of the first job that failed; 0 if all succeeded.

    Raises:
        ConfigError: a configuration is refused.
    """
    from megatron_ft.config.validate import validate

    jobs = sweep_jobs(options)
    found = Findings()
    for job in jobs:
        with found.collecting(at_fault=()):
            validate(job.config)
    found.raise_errors()
    codes: list[int] = []
    stopped: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _frame: object) -> None:
        stopped.append(number)
        # Ctrl-C reaches all processes of the terminal; other signals reach only this one.
        if number != signal.SIGINT:
            for process in running:
                process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, job in enumerate(jobs):
            if stopped:
                break
            print(f"job {number} of {len(jobs)}: {shlex.join(job.swept)}", file=sys.stderr, flush=True)
            running[:] = [subprocess.Popen([sys.executable, str(script), *options.words(job.overrides)])]
            codes.append(running[0].wait())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print(sweep_table(jobs, codes), flush=True)
    return EXIT_INTERRUPTED if stopped else next((code for code in codes if code != EXIT_OK), EXIT_OK)


def sweep_table(jobs: Sequence[SweepJob], codes: Sequence[int]) -> str:
    """Return the table of a sweep: one line for each job, with figures from ``summary.json`` of the job's run.

    Args:
        codes: exit codes of the jobs that ran, in the order of ``jobs``.
    """
    rows = [("job", "exit code", "iterations", "final loss", "validation", "seconds", "run", "overrides")]
    for number, job in enumerate(jobs):
        code = str(codes[number]) if number < len(codes) else "not started"
        found = _summary(job.run_dir) if number < len(codes) and not job.config.dry_run else {}
        figures = [
            str(found.get("iterations", "-")),
            *(f"{found[key]:.4f}" if found.get(key) is not None else "-" for key in ("final_loss", "evaluation_loss")),
            f"{found['wall_seconds']:.1f}" if found.get("wall_seconds") is not None else "-",
        ]
        folder = "-" if job.config.dry_run else str(job.run_dir)
        rows.append((str(number), code, *figures, folder, shlex.join(job.swept)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _summary(run_dir: Path) -> dict[str, Any]:
    """Return the content of the run's ``summary.json``; empty if the job has not written this file."""
    path = run_dir / "summary.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict), f"{path} contains a {type(found).__name__}"
    return found


def check_not_a_rank(launcher: str) -> None:
    """Refuse a sweep in a process that ``launcher`` (torchrun or srun) has started as a rank.

    Raises:
        ConfigError: ``launcher`` is not ``local``.
    """
    if launcher != "local":
        raise ConfigError(f"--multirun: must not be started by {launcher}, whose processes are ranks of one job")
