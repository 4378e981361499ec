"""``make prove ID=<id>``: measure a claim, keep the dated result, end with one line and its exit code.

The last line is ``<id> PASS|FAIL <figure> (<threshold>)``. A quick run stores nothing.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import hardware
from benchmarks.claims import RESULTS_DIR, Claim, load_claims
from benchmarks.source import ROOT, source_digest
from megatron_ft.errors import ConfigError
from megatron_ft.testing import leftovers

TIMED_OUT = 124
GRACE_SECONDS = 5.0
STOP_SECONDS = 60.0
"""A script that is interrupted has taken down by then what it had set up, a cluster for example."""
_LOOK_SECONDS = 0.2
_asked: list[int] = []
"""Signals that have asked this process to end."""
FIELDS = ("id", "passed", "figure", "threshold", "counts", "details")


def main(argv: Sequence[str] | None = None) -> int:
    """Prove one claim, or all that this hardware can measure. 0 when every one passed."""
    arguments = _parse(argv)
    try:
        claims = load_claims()
        if arguments.list:
            return _list(claims)
        chosen = _choose(claims, arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    lines = [prove(claim, quick=arguments.quick) for claim in chosen]
    if len(lines) > 1:
        print("\n".join(line for line, _ in lines))
    return 0 if all(passed for _, passed in lines) else 1


def prove(claim: Claim, *, quick: bool, results_dir: Path = RESULTS_DIR, root: Path = ROOT) -> tuple[str, bool]:
    """Run a claim's command with its output shown, keep a full result, print and return its last line."""
    if claim.missing is not None:
        raise ConfigError.of("ID", claim.id, f"cannot be measured here: {claim.missing}")
    # Before the script runs: the result is of the source as it was then.
    digest = None if quick else source_digest(root / claim.script, root=root)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="claim-") as folder:
        out = Path(folder) / "result.json"
        code, left = run_bounded(claim.argv(quick=quick, out=out), claim.timeout_seconds)
        result = read_result(claim, out, code, quick=quick)
    if left:
        print("processes left behind (ended now):", *left, sep="\n")
        result |= {"passed": False, "figure": f"{len(left)} processes left behind; {result['figure']}"}
    if not quick:
        result |= {"source": digest, "wall_seconds": round(time.monotonic() - started, 1)}
        store(result, results_dir)
    line = closing_line(result)
    print(line, flush=True)
    return line, bool(result["passed"])


def run_bounded(argv: Sequence[str], timeout_seconds: float) -> tuple[int, list[str]]:
    """Exit status of a command run in the repository root, 124 when it ran too long, and what it left running.

    Raises:
        SystemExit: a signal asks this process to end (``clean_up_when_ended``); what it had started has ended.
    """
    _end_if_asked()
    value, environment = leftovers.mark()
    process = subprocess.Popen(argv, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = _wait(process, timeout_seconds)
    finally:
        _stop(process)
        left = leftovers.outlive(value, grace_seconds=GRACE_SECONDS)
    _end_if_asked()
    return code, left


def _wait(process: "subprocess.Popen[bytes]", timeout_seconds: float) -> int:
    """Its exit status; 124 when it runs too long, or this process is to end."""
    deadline = time.monotonic() + timeout_seconds
    while not _asked and time.monotonic() < deadline:
        try:
            return process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return TIMED_OUT


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Let a script clean up, as after Ctrl-C; what does not end then is killed with its session."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def clean_up_when_ended() -> None:
    """Have signals that end this process end what it has started, too; a hang-up that is ignored stays so (nohup)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda asked, _frame: _asked.append(asked))


def _end_if_asked() -> None:
    if _asked:
        raise SystemExit(128 + _asked[0])


def read_result(claim: Claim, out: Path, code: int, *, quick: bool) -> dict[str, Any]:
    """Read and check the script's result; a failed result when it wrote nothing or contradicts itself."""
    reason = _why_invalid(claim, out, code, quick=quick)
    if reason is None:
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result
    why = f"no result within {claim.timeout_seconds:g} s" if code == TIMED_OUT else reason
    return {
        "id": claim.id,
        "passed": False,
        "figure": why,
        "threshold": claim.threshold,
        "counts": {},
        "details": {"exit_code": code},
    }


def _why_invalid(claim: Claim, out: Path, code: int, *, quick: bool) -> str | None:
    if not out.exists():
        return f"no result, exit code {code}"
    result = json.loads(out.read_text(encoding="utf-8"))
    missing = [field for field in FIELDS if field not in result]
    if missing:
        return f"result without {', '.join(missing)}"
    if result["id"] != claim.id:
        return f"result of {result['id']}"
    if bool(result["passed"]) != (code == 0):
        return f"result says passed={result['passed']}, exit code {code}"
    if not quick and result["threshold"] != claim.threshold:
        return f"measured against '{result['threshold']}', claimed '{claim.threshold}'"
    return None


def store(result: dict[str, Any], results_dir: Path) -> Path:
    """Write ``<id>_<hardware>_<date>.json``; a second result of the same day replaces the first."""
    machine = hardware.describe()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    record = {**result, "date": date, "hardware": machine}
    results_dir.mkdir(parents=True, exist_ok=True)
    path = results_dir / f"{result['id']}_{machine['class']}_{date}.json"
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path


def closing_line(result: dict[str, Any]) -> str:
    """``<id> PASS|FAIL <figure> (<threshold>)``."""
    verdict = "PASS" if result["passed"] else "FAIL"
    return f"{result['id']} {verdict} {result['figure']} ({result['threshold']})".replace("\n", " ")


def _choose(claims: dict[str, Claim], arguments: argparse.Namespace) -> list[Claim]:
    here = str(hardware.describe()["class"])
    if arguments.all:
        return [claim for claim in claims.values() if here in claim.hardware]
    claim = claims.get(arguments.id)
    if claim is None:
        raise ConfigError.of("ID", arguments.id, f"must be one of {', '.join(claims)}")
    if here not in claim.hardware:
        raise ConfigError.of("ID", claim.id, f"is measured on {', '.join(claim.hardware)}; this machine is {here}")
    return [claim]


def _list(claims: dict[str, Claim]) -> int:
    print("usage: make prove ID=<id> [QUICK=1]\n")
    for claim in claims.values():
        print(f"  {claim.id:<18}{claim.statement}")
    return ConfigError.exit_code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prove", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("id", nargs="?", help="id of a claim in claims.yaml")
    choice.add_argument("--all", action="store_true", help="every claim this hardware can measure")
    choice.add_argument("--list", action="store_true", help="list the claims")
    parser.add_argument("--quick", action="store_true", help="the variant of seconds; stores nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    clean_up_when_ended()
    sys.exit(main())
