"""Writes requirements/*.lock: every package of an installation, with the hashes of all its files (``make lock``).

Versions come from requirements/constraints.txt. ``uv`` finds the packages of an installation on each supported Python
version, and reads their hashes from the package index. No lock contains torch, because users choose a build of torch.
torch.lock contains the packages that CPU builds of torch need, and the packages needed to build packages without a
wheel. megatron-*.lock contain other releases of Megatron-Core than the one in train.lock (``make MEGATRON=...``).
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SETS: Mapping[str, str] = {"torch": "torch-needs.txt", "train": "train.txt", "docs": "docs.txt", "dev": "dev.txt"}
"""Maps each lock file (file of pinned versions) to its requirements file. Each lock file includes the previous one."""
HEADER = "# Written by `make lock` from constraints.txt; do not edit it by hand.\n"
MEGATRON = ("0.17.1", "0.18.2", "0.19.0")
"""Releases of Megatron-Core that are supported besides the one in constraints.txt. All have equal requirements."""
_PLATFORM = "x86_64-manylinux_2_28"
_PIN = re.compile(r'([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)(?:\s*;\s*python_version\s*(<|>=)\s*"3\.11")?')
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """Pinned version of a package, with the versions of Python for which it is pinned."""

    name: str
    """Normalized name of the package: lower case, with ``-``."""
    version: str
    pythons: str = ""
    """``<`` if the pin applies only to Python before 3.11, ``>=`` if only to 3.11 and later; empty for all versions."""

    def __str__(self) -> str:
        marker = f'; python_version {self.pythons} "3.11"' if self.pythons else ""
        return f"{self.name}=={self.version}{marker}"


def read_pins(text: str) -> dict[Pin, tuple[str, ...]]:
    """Map each pinned version in a lock file or constraints file to its hashes. A constraints file has no hashes.

    Raises:
        ValueError: a line is neither a pin, a hash nor a comment.
    """
    pins: dict[Pin, tuple[str, ...]] = {}
    for logical in text.replace("\\\n", " ").splitlines():
        line = logical.partition(" #")[0].strip()
        if not line or line.startswith(("#", "-r ")):
            continue
        match = _PIN.match(line)
        hashes = tuple(_HASH.findall(line))
        if match is None or _HASH.sub("", line[match.end() :]).strip():
            raise ValueError(
                f"{line[:80]!r}: must be name==version, optionally with a marker '; python_version < \"3.11\"' or "
                "'; python_version >= \"3.11\"'"
            )
        pins[Pin(normal(match[1]), match[2], match[3] or "")] = hashes
    return pins


def normal(name: str) -> str:
    """Return a package's name in normal form: lower case, with ``-`` instead of ``_`` and ``.``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def render(pins: Iterable[Pin], hashes: Mapping[Pin, Sequence[str]], includes: str | None = None) -> str:
    """Return the text of a lock file with ``pins``. The file includes the lock file ``includes``, if one is given."""
    lines = [HEADER, *([f"-r {includes}.lock\n"] if includes else [])]
    for pin in sorted(pins):
        lines.append(" \\\n".join([str(pin), *(f"    --hash=sha256:{found}" for found in sorted(hashes[pin]))]) + "\n")
    return "".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Write all lock files of ``requirements/``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default="uv", help="the uv command")
    uv = parser.parse_args(argv).uv
    constraints = read_pins((FOLDER / "constraints.txt").read_text())
    hashes = {**_hashes(uv, constraints, "3.10", ("", "<")), **_hashes(uv, constraints, "3.12", ("", ">="))}
    known, done, before = {pin.name for pin in constraints}, set[str](), None
    for name, file in SETS.items():
        members = {found for python in PYTHONS for found in _closure(uv, (SETS["torch"], file), python)}
        if members - known:
            print(f"constraints.txt: must also pin {', '.join(sorted(members - known))}", file=sys.stderr)
            return 1
        text = render([pin for pin in constraints if pin.name in members - done], hashes, before)
        (FOLDER / f"{name}.lock").write_text(text)
        print(f"requirements/{name}.lock: {len(members - done)} packages, {text.count('--hash')} files")
        done, before = done | members, name
    for release in MEGATRON:
        pin = Pin("megatron-core", release)
        text = render([pin], _hashes(uv, [pin], "3.12", ("",)))
        (FOLDER / f"megatron-{release}.lock").write_text(text)
        print(f"requirements/megatron-{release}.lock: 1 package, {text.count('--hash')} files")
    return 0


def _hashes(uv: str, pins: Iterable[Pin], python: str, kinds: tuple[str, str]) -> dict[Pin, tuple[str, ...]]:
    """Read from the package index the hashes of all ``pins`` whose field ``pythons`` is one of ``kinds``."""
    wanted = [pin for pin in pins if pin.pythons in kinds]
    plain = {Pin(pin.name, pin.version): pin for pin in wanted}
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "pins.txt")
        listed.write_text("".join(f"{pin}\n" for pin in plain))
        found = read_pins(_compile(uv, ["--no-deps", "--generate-hashes", str(listed)], python))
    return {plain[pin]: listed for pin, listed in found.items()}


def _closure(uv: str, files: Sequence[str], python: str) -> set[str]:
    """Return the names of all packages that installing the requirements ``files`` would install. Leave out torch and
    packages that only CUDA builds of torch need."""
    with tempfile.TemporaryDirectory() as folder:
        never = Path(folder, "never.txt")
        never.write_text('torch==0; sys_platform == "never"\n')
        arguments = ["--constraint", str(FOLDER / "constraints.txt"), "--override", str(never)]
        text = _compile(uv, [*arguments, *(str(FOLDER / name) for name in files)], python)
    return {pin.name for pin in read_pins(text)}


def _compile(uv: str, arguments: Sequence[str], python: str) -> str:
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-emit-index-url"]
    platform = ["--python-version", python, "--python-platform", _PLATFORM]
    environment = dict(os.environ)
    if certificates := environment.get("PIP_CERT"):  # certificates that pip trusts on this machine
        environment.setdefault("SSL_CERT_FILE", certificates)
    whole = [*command, *platform, *arguments]
    return subprocess.run(whole, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


if __name__ == "__main__":
    sys.exit(main())
