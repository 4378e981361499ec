"""Commands of the project, one per file: ``python -m tools.NAME``."""

import sys
from types import TracebackType

from megatron_ft.errors import ConfigError
from megatron_ft.installed import not_installed


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report a missing package in one line. Report any other error as Python does."""
    if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] in ("megatron_ft", "tools"):
        sys.__excepthook__(kind, error, trace)
        return
    print(not_installed(error), file=sys.stderr)
    raise SystemExit(ConfigError.exit_code)


# A command imports modules of the project before its ``main`` runs. So ``main`` cannot report that a package is
# missing. Python calls this function for every exception that is not caught.
sys.excepthook = _report
