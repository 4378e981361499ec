"""Collects all independent errors of one command, and leaves out errors that only follow from other errors.

A check raises only the first error that it finds. A key *at fault* is a key that causes an error. After an error,
``find_errors`` gives the keys at fault their default values and runs the check again. So one check can report several
errors. Later errors that name a key at fault are left out as consequences. Otherwise a wrong ``model.num_moe_experts``
would be reported once for each key that must fit it.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.errors import CheckpointError, ConfigError, MegatronFtError, SeveralErrors, SoftwareError

Check = Callable[[JobConfig], object]
"""A check of a configuration. It raises ``ConfigError`` for the first violated rule."""

_DEFAULT = JobConfig()
_GROUPS = {
    field.name: frozenset(each.name for each in dataclasses.fields(getattr(_DEFAULT, field.name)))
    for field in dataclasses.fields(JobConfig)
    if dataclasses.is_dataclass(getattr(_DEFAULT, field.name))
}
_KEY = re.compile(rf"\b({'|'.join(_GROUPS)})\.(\w+)")


def keys_in(error: MegatronFtError) -> list[str]:
    """Return the configuration keys in the error's message, each once, in the order of the message."""
    found = _KEY.findall(str(error))
    return list(dict.fromkeys(f"{group}.{name}" for group, name in found if name in _GROUPS[group]))


class Findings:
    """Independent errors of one command, in the order in which they were added."""

    def __init__(self) -> None:
        self.errors: list[MegatronFtError] = []
        self._at_fault: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.errors)

    def add(self, error: MegatronFtError, *, at_fault: Iterable[str] | None = None) -> None:
        """Add ``error``. Leave it out if it names a key that may have caused an earlier error, because it may be only
        a consequence of that error.

        Args:
            at_fault: keys, or names of groups, that may have caused ``error``; None: all keys that ``error`` names.
        """
        for each in error.errors if isinstance(error, SeveralErrors) else (error,):
            names = keys_in(each)
            is_consequence = any(name in self._at_fault or name.partition(".")[0] in self._at_fault for name in names)
            if not is_consequence and str(each) not in map(str, self.errors):
                self.errors.append(each)
        self.blame(keys_in(error) if at_fault is None else at_fault)

    def blame(self, keys: Iterable[str]) -> None:
        """Mark ``keys`` (keys or groups of keys) as at fault, so that later errors which name them are left out."""
        self._at_fault.update(keys)

    @contextlib.contextmanager
    def collecting(self, *, at_fault: Iterable[str] | None = None) -> Iterator[None]:
        """Catch a configuration, checkpoint or software error in the ``with`` block, and pass it to ``add``."""
        try:
            yield
        except (ConfigError, CheckpointError, SoftwareError) as error:
            self.add(error, at_fault=at_fault)

    def raise_errors(self) -> None:
        """Raise the errors. Do nothing if there are none.

        Raises:
            MegatronFtError: there is exactly one error. SeveralErrors: there are several.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise SeveralErrors(self.errors)


def find_errors(config: JobConfig, checks: Iterable[Check], found: Findings) -> JobConfig:
    """Add errors of all ``checks`` to ``found``. Return ``config`` with default values for keys that cause errors.

    ``checks`` must begin with the checks of single keys. Then the checks of combinations of keys get only valid values,
    and cannot divide by a size of 0.
    """
    for check in checks:
        while (error := _error_of(check, config)) is not None:
            keys, repaired = _repair(check, config, error)
            found.add(error, at_fault=keys)
            if repaired is None:  # the default values themselves are at fault
                break
            config = repaired
    return config


def _error_of(check: Check, config: JobConfig) -> ConfigError | None:
    try:
        check(config)
    except ConfigError as error:
        return error
    return None


def _repair(check: Check, config: JobConfig, error: ConfigError) -> tuple[Sequence[str], JobConfig | None]:
    """Find the fewest keys named in ``error`` whose default values remove the error and its consequences. Return these
    keys and the changed configuration. The configuration is None if no default value changes the error."""
    named = keys_in(error)
    given = [key for key in named if value_of(config, key) != value_of(_DEFAULT, key)]
    fallback: tuple[Sequence[str], JobConfig | None] = (named[:1], None)
    for keys in chain([[key] for key in given], [given] if len(given) > 1 else []):
        changed = _with_defaults(config, keys)
        after = _error_of(check, changed)
        remaining = [] if after is None else keys_in(after)
        # The next error is independent if it names no key of ``keys``, and ``error`` does not name its first key.
        if after is None or not (set(remaining) & set(keys) or set(remaining[:1]) & set(named)):
            return keys, changed
        if str(after) != str(error):
            fallback = keys, changed
    return fallback


def value_of(config: JobConfig, key: str) -> Any:
    """Return the value of a key that consists of group and name, such as ``training.seed``."""
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)


def _with_defaults(config: JobConfig, keys: Sequence[str]) -> JobConfig:
    for key in keys:
        group, _, name = key.partition(".")
        changed = dataclasses.replace(getattr(config, group), **{name: value_of(_DEFAULT, key)})
        config = dataclasses.replace(config, **{group: changed})
    return config
