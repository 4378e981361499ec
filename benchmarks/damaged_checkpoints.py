"""Claim ``damaged-checkpoints``: a damaged window or dense checkpoint is never loaded as if it were intact.

Files are partly written in a crash, have flipped bits, are made by an attacker, or are cut by a full disk. A load must
return the newest intact sample, or the one before it, completely, and must name the file that it skipped. Every command
of the tools that reads checkpoints must refuse damaged ones by name, and write nothing (``damaged_tools.py``).
"""

import errno
import os
import random
import re
import resource
import shutil
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.crashes import Disk, Recorder, crash_states, torn_files
from benchmarks.damaged_tools import COMMANDS, run_all
from benchmarks.hostile_files import MARKER, Hostile, hostile_checkpoints, hostile_windows
from benchmarks.report import finish, parse_arguments
from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage import files
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME
from megatron_ft.testing.jobs import inside
from megatron_ft.testing.stored_samples import KINDS, NEW, OLD, Kind, Loaded, sample_window

ID = "damaged-checkpoints"
THRESHOLD = (
    "0 silently wrong of all damaged loads; every crash prefix gives the newest or the previous one; "
    "every failed write leaves the previous intact; every command refuses damaged inputs by name and writes nothing"
)
NUM_FLIPS, QUICK_NUM_FLIPS = 5000, 200
TOOLS_STRIDE, QUICK_TOOLS_STRIDE = 1, 41
"""Every command of the tools gets every ``TOOLS_STRIDE``-th damaged input."""
MIN_HOSTILE = 500
MAX_GROWTH_BYTES = 64 << 20
"""Limit of the memory that the process may gain while it reads hostile files."""
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
_MEMORY = "/dev/shm"
_KEY = re.compile(rb'"(\w+)": ?')


@dataclass(slots=True)
class Tally:
    """Outcomes so far, and everything that violates the claim."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def damaged(self, family: str, what: str, loaded: Loaded, victim: Path) -> None:
        """Count a load after the file ``victim`` of the newest sample was damaged."""
        outcome = judge(loaded, victim)
        self.outcomes[f"{family}_{outcome}"] += 1
        if outcome not in ("detected", "harmless"):
            self.problems.append(f"{what}: {outcome}: {loaded}")

    def expect(self, family: str, what: str, holds: bool, text: object) -> None:
        """Count a case in which ``holds`` must be true."""
        self.outcomes[f"{family}_{'kept' if holds else 'broken'}"] += 1
        if not holds:
            self.problems.append(f"{what}: {text}")


def judge(loaded: Loaded, victim: Path) -> str:
    """Classify a load after damage: ``detected``; ``harmless`` (the newest sample was loaded with all bytes);
    ``silent`` (wrong bytes were loaded); ``unnamed`` (the damaged file was not reported); or ``lost`` (the previous
    sample was not loaded either)."""
    if not loaded.is_equal:
        return "silent"
    if loaded.iteration == NEW:
        return "harmless"
    if loaded.iteration != OLD:
        return "lost"
    return "detected" if any(str(victim) in reason for reason in loaded.reasons) else "unnamed"


def main(argv: Sequence[str] | None = None) -> int:
    """Damage both kinds of files in every way, and judge the loads."""
    arguments = parse_arguments(__doc__, argv)
    tally = Tally()
    _try_tools(tally, QUICK_TOOLS_STRIDE if arguments.quick else TOOLS_STRIDE)
    with _folder() as name, inside(Path(name)) as root:
        growth = _be_hostile(root, tally)
        for kind in KINDS:
            crash(kind, root / f"crash-{kind.name}", tally, stride=37 if arguments.quick else 1)
            tear(kind, root / f"torn-{kind.name}", tally, stride=5 if arguments.quick else 1)
            flip(kind, root / f"flip-{kind.name}", tally, QUICK_NUM_FLIPS if arguments.quick else NUM_FLIPS)
            fail(kind, root / f"fail-{kind.name}", tally, stride=11 if arguments.quick else 1)
    return _finish(arguments.out, tally, growth)


def _try_tools(tally: Tally, stride: int) -> None:
    with _folder() as name:
        counts, problems = run_all(Path(name), stride=stride)
    print(f"tools: {counts}, {len(problems)} problems", file=sys.stderr, flush=True)
    tally.outcomes.update(counts)
    tally.problems += problems


def _folder() -> tempfile.TemporaryDirectory[str]:
    # Thousands of small folders are written and removed: in memory, if the machine has a file system there. Crashes are
    # simulated from the calls of a save, so they do not depend on the file system.
    return tempfile.TemporaryDirectory(prefix="damaged-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None)


def _finish(out: Path | None, tally: Tally, growth_bytes: int) -> int:
    counts, problems = tally.outcomes, tally.problems
    hostile = sum(counts[name] for name in counts if name.startswith("hostile_"))
    if hostile < MIN_HOSTILE:
        problems.append(f"only {hostile} hostile files")
    if growth_bytes > MAX_GROWTH_BYTES:
        problems.append(f"hostile files took {growth_bytes} bytes of memory")
    for problem in problems[:50]:
        print(problem, file=sys.stderr)
    damaged = {
        name: sum(counts[f"{family}_{name}"] for family in ("torn", "flip")) for name in ("detected", "harmless")
    }
    refused = sum(count for name, count in counts.items() if name.startswith("tools_") and name.endswith("_refused"))
    silent = sum(count for name, count in counts.items() if name.endswith("_silent"))
    figure = (
        f"{silent} silently wrong, {damaged['detected']} torn files and bit flips detected, {damaged['harmless']} "
        f"without effect; {counts['hostile_detected']} of {hostile} hostile files refused; "
        f"{counts['crash_kept']} crash states and {counts['fail_kept']} failed writes left the newest or the previous; "
        f"{refused} refusals by {len(COMMANDS)} commands of the tools"
    )
    return finish(
        out,
        ID,
        passed=not problems,
        figure=figure,
        threshold=THRESHOLD,
        counts=dict(sorted(counts.items())),
        details={"problems": problems[:200], "hostile_growth_bytes": growth_bytes},
    )


def crash(kind: Kind, root: Path, tally: Tally, stride: int = 1) -> None:
    """Test crashes: every prefix of the calls of the first save, the next save, a save over a damaged sample, and a
    deletion."""
    live = root / "live"
    live.mkdir(parents=True)
    store = live / "store"
    runs: Sequence[tuple[str, Callable[[], None], tuple[int | None, ...], int]] = (
        ("first save", lambda: kind.save(store, OLD), (None, OLD), OLD),
        ("next save", lambda: kind.save(store, NEW), (OLD, NEW), NEW),
        ("save over a damaged one", lambda: kind.save(store, NEW), (OLD, NEW), NEW),
        ("deletion", lambda: kind.retire(store), (NEW,), NEW),
    )
    for seed, (name, act, allowed, last) in enumerate(runs):
        if name == "save over a damaged one":
            _overwrite(kind.files(store, NEW)[0])
        recorder = Recorder(live)
        with recorder.recording():
            act()
        end = f"{len(recorder.changes)} of"
        for index, (what, make) in enumerate(crash_states(recorder.before, recorder.changes, seed)):
            is_end = what.startswith(end)
            if index % stride and not is_end:
                continue
            loaded, is_led_astray = _load_from(make(), root / "state", kind)
            holds = loaded.is_equal and not is_led_astray and loaded.iteration in ((last,) if is_end else allowed)
            tally.expect("crash", f"{kind.name}, {name}, {what}", holds, loaded)


def _overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _load_from(disk: Disk, folder: Path, kind: Kind) -> tuple[Loaded, bool]:
    """Load a sample. Return the result, and whether the pointer to the newest sample is damaged or names an incomplete
    sample."""
    disk.write_to(folder)
    try:
        return kind.load(folder / "store"), kind.pointer_leads_nowhere(folder / "store")
    finally:
        shutil.rmtree(folder)


def tear(kind: Kind, store: Path, tally: Tally, stride: int = 1) -> None:
    """Test torn files: one file of the newest sample is cut, is missing, or has a page that is zero, stale or
    doubled."""
    kind.save(store, OLD)
    kind.save(store, NEW)
    for path, old in zip(kind.files(store, NEW), kind.files(store, OLD), strict=True):
        content = path.read_bytes()
        damages: dict[str, bytes | None] = {**torn_files(content, old.read_bytes()), "missing": None}
        for what in list(damages)[::stride]:
            with _replaced(path, damages[what]):
                tally.damaged("torn", f"{kind.name}, {path.name}, {what}", kind.load(store), path.parent)


def flip(kind: Kind, store: Path, tally: Tally, num_flips: int) -> None:
    """Test bit flips: flip one bit at a time, equally often in every class of bytes."""
    kind.save(store, OLD)
    kind.save(store, NEW)
    places = {path: classes(path) for path in kind.files(store, NEW)}
    all_classes = [(path, name) for path, found in places.items() for name in found]
    generator = random.Random(kind.name)
    for trial in range(num_flips):
        path, name = all_classes[trial % len(all_classes)]
        content = bytearray(path.read_bytes())
        position = generator.choice(places[path][name])
        bit = generator.randrange(8)
        content[position] ^= 1 << bit
        with _replaced(path, bytes(content)):
            what = f"{kind.name}, {path.name}, {name}, bit {bit} of byte {position}"
            tally.damaged("flip", what, kind.load(store), path)


def classes(path: Path) -> dict[str, list[int]]:
    """Return the positions of a file's bytes by the class of the byte."""
    content = path.read_bytes()
    if path.suffix == ".window":
        return _window_classes(path, content)
    if path.name == MANIFEST_NAME:
        return _fields(content, 0)
    return {"data": list(range(len(content)))}


def _window_classes(path: Path, content: bytes) -> dict[str, list[int]]:
    length = struct.unpack_from("<Q", content, 12)[0]
    found = {"magic": range(8), "version": range(8, 12), "length": range(12, 20), "checksum": range(20, 36)}
    named = {name: list(positions) for name, positions in found.items()}
    named |= _fields(content[36 : 36 + length], 36)
    window, _ = sample_window(NEW, int(path.stem.rpartition("-")[2]))
    start = len(content) - window.num_bytes
    named["padding before the payload"] = list(range(36 + length, start))
    for part in window.slices:
        for first, stop, index in part.extents():
            name = "padding in a slice" if index is None else f"payload of {part.pieces[index].component}"
            base = start + part.offset
            named.setdefault(name, []).extend(range(base + first, base + stop))
    return named


def _fields(manifest: bytes, offset: int) -> dict[str, list[int]]:
    """Return the bytes of a manifest by the key before them, including the key."""
    matches = list(_KEY.finditer(manifest))
    ends = [match.start() for match in matches[1:]] + [len(manifest)]
    named: dict[str, list[int]] = {"begin": list(range(offset, offset + matches[0].start()))}
    for match, end in zip(matches, ends, strict=True):
        named.setdefault(f"field {match[1].decode()}", []).extend(range(offset + match.start(), offset + end))
    return named


def fail(kind: Kind, store: Path, tally: Tally, stride: int = 1) -> None:
    """Test failed writes: each call of a save fails with each error, writes also after half of their bytes. Then the
    save is repeated.

    The error must name the file or directory that failed.
    """
    kind.save(store, OLD)
    faults = list(_faults(kind, store))
    for name, index, code, is_half in faults[::stride]:
        what = f"{kind.name}, {name} {index} fails with {errno.errorcode[code]}{' after half' * is_half}"
        trial = store.with_name(f"{store.name}-trial")
        shutil.copytree(store, trial)
        error = _save_with_fault(kind, trial, name, index, code, is_half)
        loaded = kind.load(trial)
        leftovers = [path.name for path in trial.rglob("*.tmp")]
        kind.save(trial, NEW)
        again = kind.load(trial)
        holds = (
            error is not None and str(trial.parent) in str(error) and loaded.is_equal and loaded.iteration in (OLD, NEW)
        )
        holds = holds and not leftovers and again.is_equal and again.iteration == NEW
        tally.expect("fail", what, holds, f"{error!r}, {loaded}, {leftovers}, then {again}")
        shutil.rmtree(trial)


_CALLS: Mapping[str, tuple[Any, str]] = {"write": (files, "_write"), "fsync": (os, "fsync"), "rename": (os, "rename")}


def _faults(kind: Kind, store: Path) -> Iterator[tuple[str, int, int, bool]]:
    """Yield (call, its index, error, whether half is written before) of everything that can fail in a save."""
    for name, (owner, attribute) in _CALLS.items():
        trial = store.with_name(f"{store.name}-count")
        shutil.copytree(store, trial)
        with mock.patch.object(owner, attribute, side_effect=getattr(owner, attribute)) as spy:
            kind.save(trial, NEW)
        shutil.rmtree(trial)
        for index in range(spy.call_count):
            yield from ((name, index, code, False) for code in ERRORS)
            if name == "write":
                yield name, index, errno.ENOSPC, True


def _save_with_fault(kind: Kind, store: Path, name: str, index: int, code: int, is_half: bool) -> Exception | None:
    owner, attribute = _CALLS[name]
    call, calls = getattr(owner, attribute), iter(range(1 << 30))

    def faulty(*args: Any) -> Any:
        number = next(calls)
        if number == index and is_half and len(args[1]) > 1:
            return call(args[0], args[1][: len(args[1]) // 2])
        if number in (index, index + 1) and (number == index or is_half):
            raise OSError(code, os.strerror(code), *(args[:1] if name == "rename" else ()))
        return call(*args)

    try:
        with mock.patch.object(owner, attribute, faulty):
            kind.save(store, NEW)
    except (OSError, CheckpointError) as error:
        return error
    return None


def _be_hostile(root: Path, tally: Tally) -> int:
    """Test hostile files. Return the bytes of memory that the process gained."""
    cases = {"window": hostile_windows(), "dense": hostile_checkpoints()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind in KINDS:
        store = root / f"hostile-{kind.name}"
        kind.save(store, OLD)
        kind.save(store, NEW)
        for case in cases[kind.name]:
            meet(kind, store, case, tally)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def meet(kind: Kind, store: Path, case: Hostile, tally: Tally) -> None:
    """Load with one hostile file in place. The load must refuse the file by name, run no code and change no file."""
    trial = store.with_name(f"{store.name}-trial")
    shutil.copytree(store, trial, symlinks=True)
    victim = case.put(trial)
    listing = sorted(path.relative_to(store.parent) for path in store.parent.rglob("*"))
    loaded = kind.load(trial)
    tally.damaged("hostile", case.name, loaded, victim)
    if loaded.iteration == NEW:
        tally.problems.append(f"{case.name}: accepted")
    if Path(MARKER).exists() or sorted(path.relative_to(store.parent) for path in store.parent.rglob("*")) != listing:
        tally.problems.append(f"{case.name}: ran code or left something behind")
    shutil.rmtree(trial)


@contextmanager
def _replaced(path: Path, content: bytes | None) -> Iterator[None]:
    """Replace the content of ``path`` in the block, or remove the file if ``content`` is None."""
    before = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


if __name__ == "__main__":
    sys.exit(main())
