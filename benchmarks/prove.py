"""``make prove ID=<id>``: measures a claim, stores the dated result, and ends with one line and an exit code.

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
"""Time in which an interrupted script can remove what it has set up, e.g. a cluster."""
_LOOK_SECONDS = 0.2
_asked: list[int] = []
"""Signals that have requested this process to end."""
FIELDS = ("id", "passed", "figure", "threshold", "counts", "details")


def main(argv: Sequence[str] | None = None) -> int:
    """Prove one claim, or all claims that this hardware can measure. Return 0 if every claim passed."""
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
    """Run a claim's command and show its output. Store a full result, print its last line, and return that line."""
    if claim.missing is not None:
        raise ConfigError.of("ID", claim.id, f"cannot be measured here: {claim.missing}")
    # The digest is computed before the script runs, because the result belongs to that source.
    digest = None if quick else source_digest(root / claim.script, root=root)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="claim-") as folder:
        out = Path(folder) / "result.json"
        code, left = run_bounded(claim.argv(quick=quick, out=out), claim.timeout_seconds)
        result = read_result(claim, out, code, quick=quick)
    if left:
        print("processes left behind (ended now):", *left, sep="\n")
        result |= {"passed": False, "figure": f"processes left behind: {len(left)}; {result['figure']}"}
    if not quick:
        result |= {"source": digest, "wall_seconds": round(time.monotonic() - started, 1)}
        store(result, results_dir)
    line = closing_line(result)
    print(line, flush=True)
    return line, bool(result["passed"])


def run_bounded(argv: Sequence[str], timeout_seconds: float) -> tuple[int, list[str]]:
    """Run a command in the repository. Return its exit status, 124 if it took too long, and the processes that it left
    behind.

    Raises:
        SystemExit: a signal requests this process to end (``clean_up_when_ended``). All processes that it had started
            have ended.
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
    """Return the exit status of a process; 124 if it takes too long or if this process must end."""
    deadline = time.monotonic() + timeout_seconds
    while not _asked and time.monotonic() < deadline:
        try:
            return process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return TIMED_OUT


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt a script like Ctrl-C, so that it can clean up. If it does not end, kill its whole session."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def clean_up_when_ended() -> None:
    """Make signals that end this process also end the processes that it has started. A SIGHUP that is ignored stays
    ignored (nohup)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda asked, _frame: _asked.append(asked))


def _end_if_asked() -> None:
    if _asked:
        raise SystemExit(128 + _asked[0])


def read_result(claim: Claim, out: Path, code: int, *, quick: bool) -> dict[str, Any]:
    """Read and check the script's result. If the script wrote none, or one that contradicts itself, return a failed
    result."""
    reason = _why_invalid(claim, out, code, quick=quick)
    if reason is None:
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result
    why = f"the script wrote no result within {claim.timeout_seconds:g} s" if code == TIMED_OUT else reason
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
        return f"the script wrote no result and ended with exit code {code}"
    result = json.loads(out.read_text(encoding="utf-8"))
    missing = [field for field in FIELDS if field not in result]
    if missing:
        return f"the result lacks {', '.join(missing)}"
    if result["id"] != claim.id:
        return f"the result is that of the claim {result['id']}"
    if bool(result["passed"]) != (code == 0):
        return f"the result has passed={result['passed']}, but the exit code is {code}"
    if not quick and result["threshold"] != claim.threshold:
        return f"the result has the threshold '{result['threshold']}', but the claim has '{claim.threshold}'"
    return None


def store(result: dict[str, Any], results_dir: Path) -> Path:
    """Write ``<id>_<hardware>_<date>.json``. A second result of the same day replaces the first one."""
    machine = hardware.describe()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    record = {**result, "date": date, "hardware": machine}
    results_dir.mkdir(parents=True, exist_ok=True)
    path = results_dir / f"{result['id']}_{machine['class']}_{date}.json"
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return path


def closing_line(result: dict[str, Any]) -> str:
    """Return the line ``<id> PASS|FAIL <figure> (<threshold>)``."""
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
    choice.add_argument("--all", action="store_true", help="prove every claim that this hardware can measure")
    choice.add_argument("--list", action="store_true", help="list the claims")
    parser.add_argument(
        "--quick", action="store_true", help="run the quick variant, which takes seconds and stores nothing"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    clean_up_when_ended()
    sys.exit(main())
