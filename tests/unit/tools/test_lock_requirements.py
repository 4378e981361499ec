"""Tests that the locks agree with the constraints, have a hash for every package, and are complete; without network."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.lock_requirements import FOLDER, HEADER, SETS, Pin, normal, read_pins, render

NAMES = list(SETS)
CONSTRAINTS = read_pins((FOLDER / "constraints.txt").read_text())
LOCKS = {name: read_pins((FOLDER / f"{name}.lock").read_text()) for name in NAMES}


def installed_by(name: str) -> dict[Pin, tuple[str, ...]]:
    """Return the pins of a lock and of the locks that it includes."""
    return {pin: hashes for other in NAMES[: NAMES.index(name) + 1] for pin, hashes in LOCKS[other].items()}


def test_locks_have_the_constraints_versions_and_nothing_else() -> None:
    assert not set(installed_by("dev")) - set(CONSTRAINTS), "run `make lock`"
    assert not set(CONSTRAINTS) - set(installed_by("dev")), "constraints that nothing needs, or `make lock` was not run"
    assert all(not hashes for hashes in CONSTRAINTS.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_package_has_hashes_and_is_in_one_lock(name: str) -> None:
    assert LOCKS[name] and all(LOCKS[name].values())
    assert not [pin for pin in LOCKS[name] for other in NAMES if other != name and pin in LOCKS[other]]
    assert "torch" not in {pin.name for pin in LOCKS[name]}
    text = (FOLDER / f"{name}.lock").read_text()
    before = NAMES[NAMES.index(name) - 1] if NAMES.index(name) else None
    assert text == render(LOCKS[name], LOCKS[name], before) and text.startswith(HEADER)


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_no_file_names_a_server(path: Path) -> None:
    assert not re.search(r"://|index-url|find-links", path.read_text())


def test_a_python_takes_at_most_one_version_of_a_package() -> None:
    for older in (True, False):
        names = [pin.name for pin in CONSTRAINTS if pin.pythons in ("", "<" if older else ">=")]
        assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", NAMES[1:])
def test_what_is_asked_for_and_what_that_needs_is_in_the_lock(name: str) -> None:
    """Uses the metadata of installed packages. Torch and its requirements are chosen by the user."""
    known = {pin.name for pin in installed_by(name)} | {"torch"}
    asked = [Requirement(line) for line in (FOLDER / SETS[name]).read_text().splitlines() if line[:1] not in "#-"]
    assert {normal(found.name) for found in asked} <= known
    for package in known - {"torch"}:
        try:
            needs = map(Requirement, importlib.metadata.requires(package) or [])
        except importlib.metadata.PackageNotFoundError:  # of another Python
            continue
        wanted = {normal(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}
        assert wanted <= known, f"{package} needs what {name}.lock lacks; run `make lock`"


@pytest.mark.parametrize("line", ["numpy>=1", "numpy", "a==1; sys_platform == 'linux'", "-e .", "a==1 --hash=md5:00"])
def test_a_line_that_is_no_pin_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="must be name==version"):
        read_pins(line)
