"""Exceptions of the project. Each class has an exit code, which a command returns if it ends with the exception.

The message of an exception names the key, the value and the constraint, and says what to change.
"""

from collections.abc import Sequence
from pathlib import Path


class MegatronFtError(Exception):
    """Base class of all errors of this project."""

    exit_code = 1


class ConfigError(MegatronFtError):
    """An invalid configuration. Raised before any rank starts."""

    exit_code = 2

    @classmethod
    def of(cls, key: str, value: object, constraint: str) -> "ConfigError":
        """Make an error with the message ``key=value: constraint``, e.g. with the constraint ``must be at least 1``."""
        return cls(f"{key}={value}: {constraint}")


class DataError(ConfigError):
    """An input file that is missing, damaged or empty."""

    exit_code = 3


class SeveralErrors(ConfigError):
    """Several independent errors of one command. The exit code is that of the first error."""

    def __init__(self, errors: Sequence[MegatronFtError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = tuple(errors)
        self.exit_code = errors[0].exit_code


class SoftwareError(MegatronFtError):
    """Installed software that cannot run the configuration, e.g. an incomplete Transformer Engine."""

    exit_code = 4


class CheckpointError(MegatronFtError):
    """A checkpoint that is missing, damaged, or of another run."""

    exit_code = 5


class UnreadableError(CheckpointError):
    """The storage could not read a file of a checkpoint. The file may be undamaged, so a restart may succeed."""

    exit_code = MegatronFtError.exit_code

    def __init__(self, message: str, checkpoint: Path | None = None) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint


class TrainingStopped(MegatronFtError):
    """Raised if a policy stops the run because of non-finite values, a loss spike, or too many skipped updates."""

    exit_code = 6


class RankFailed(MegatronFtError):
    """A failed rank: its process died or raised an error."""

    exit_code = 7


class RankLost(RankFailed):
    """Raised in a rank that cannot continue. The job then recovers as if the process of this rank had been killed."""


class ControlError(MegatronFtError):
    """A process of the control plane rejected another process, or lost the connection to it."""

    exit_code = 8


class RecoveryError(MegatronFtError):
    """A failed recovery: the state before the failure could not be restored, or was restored with other bits."""

    exit_code = 9


EXIT_OK = 0
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM; the run can be resumed."""

# ``slurm/pretrain_array.sbatch`` repeats the exit codes of these errors as a pattern; a test compares both.
FINAL_ERRORS = (ConfigError, DataError, SoftwareError, CheckpointError, TrainingStopped)
"""Classes of errors that would occur again after a restart. A job that ends with one of them is not restarted."""
FINAL_EXIT_CODES = frozenset(error.exit_code for error in FINAL_ERRORS)

EXIT_CODES: dict[int, str] = {
    EXIT_OK: "the run ended as planned",
    MegatronFtError.exit_code: "another error; see the traceback",
    ConfigError.exit_code: "the configuration cannot run; nothing was started",
    DataError.exit_code: "an input file is missing, damaged or empty; nothing was started",
    SoftwareError.exit_code: "the installed software cannot run this configuration",
    CheckpointError.exit_code: "a checkpoint is missing, damaged, or of another run",
    TrainingStopped.exit_code: "a policy stopped the run (non-finite values, loss spike)",
    RankFailed.exit_code: "a rank died; the output names the first failed rank and shows its traceback",
    ControlError.exit_code: "a process of the control plane rejected another process or lost its connection",
    RecoveryError.exit_code: "the state before a failure could not be restored exactly",
    EXIT_INTERRUPTED: "stopped by Ctrl-C or SIGTERM; resume with run.resume=must",
}
"""Exit codes of ``pretrain_moe.py`` and their meanings."""
