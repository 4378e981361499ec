"""Tests conventions that no other tool checks: sizes, READMEs, documented keys, imports."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_ft.testing.jobs import REPOSITORY as ROOT
from tools.code_size import CodeSize, measure

PACKAGE = ROOT / "megatron_ft"
EXTENSION = ROOT / "transformer_engine_ext"
MAX_LINES = 600
ENTRY = ("pretrain_moe.py", "hydra_entry.py")
NO_TORCH = ("errors.py", "topology.py", "operators.py", "events.py", "failpoints.py", "corpus", "config", "planning")
NO_TORCH += ("control", "telemetry", "doctor", "records.py", "expert_loads.py", "failures")
NO_TORCH += ("durable.py", "formatting.py", "serde.py")
MODULE_NAME = re.compile(r"\w+(?:\.\w+)+(?::\w+)?")
IMPORT_IN_TEXT = re.compile(r"^\s*(?:from|import) (\w+(?:\.\w+)*)", re.MULTILINE)
MACHINE_PATH = re.compile(r"/(?:home|root|Users|work|tmp)/[\w.-]+")


MOST_PACKAGE_LINES = 68_950
MOST_NAMES_PER_THOUSAND = 29.9
LEAST_COMMENTS_PER_THOUSAND = 7.0
"""Bounds of ``tools.code_size``. Only a change that adds a feature may raise the first. The second may only be lowered,
and the last may only be raised."""


def python_files(*parts: str) -> list[Path]:
    """Return all Python files in the given parts of the repository."""
    tops = [ROOT / part for part in parts]
    found = [top for top in tops if top.is_file()] + [path for top in tops for path in top.rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def name(path: Path) -> str:
    """Return a file's path inside the repository."""
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Return the full names of all modules that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def importers(parts: tuple[str, ...], forbidden: set[str]) -> list[str]:
    """Return the files in ``parts`` that import one of the ``forbidden`` top-level packages."""
    return [
        f"{name(path)} imports {module}"
        for path in python_files(*parts)
        for module in imports(path)
        if module.partition(".")[0] in forbidden
    ]


def test_no_file_is_too_long() -> None:
    files = python_files("megatron_ft", "transformer_engine_ext", "tools", "benchmarks", *ENTRY)
    lines = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


@pytest.fixture(scope="module")
def code_size() -> CodeSize:
    return measure()


def test_the_package_does_not_grow(code_size: CodeSize) -> None:
    assert code_size.num_lines <= MOST_PACKAGE_LINES, code_size.summary()
    assert code_size.names_per_thousand <= MOST_NAMES_PER_THOUSAND, code_size.summary()
    assert code_size.comments_per_thousand >= LEAST_COMMENTS_PER_THOUSAND, code_size.summary()
    assert code_size.longest[1] <= MAX_LINES, code_size.summary()


def test_every_folder_maps_its_files() -> None:
    folders = sorted({path.parent for path in python_files("megatron_ft", "transformer_engine_ext")})
    problems = []
    for folder in folders:
        readme = folder / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.exists() else ""
        files = sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")
        children = sorted(f"{path.name}/" for path in folder.iterdir() if path in folders)
        problems += [f"{name(readme)} does not name {entry}" for entry in files + children if f"`{entry}`" not in text]
    assert problems == []


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_flat_folders_map_their_files(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    assert sorted(file for file in files if f"`{file}`" not in text) == []


def test_maps_name_only_what_exists() -> None:
    rows = re.compile(r"^\| `([\w./-]+)` \|", re.MULTILINE)
    stale = [
        f"{name(readme)} names {entry}"
        for readme in [*PACKAGE.rglob("README.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]
        for entry in rows.findall(readme.read_text(encoding="utf-8"))
        if set("./") & set(entry) and not (readme.parent / entry).exists()
    ]
    assert stale == []


@pytest.mark.parametrize("path", python_files("megatron_ft/config"), ids=name)
def test_every_knob_is_documented(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for group in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Config")):
        if group.name == "JobConfig":
            continue
        followers = zip(group.body, [*group.body[1:], None], strict=True)
        bare = [
            ast.unparse(node.target)
            for node, after in followers
            if isinstance(node, ast.AnnAssign) and not _is_docstring(after)
        ]
        assert bare == [], f"{group.name} has fields without a docstring"


def _is_docstring(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_nothing_below_runtime_imports_torch() -> None:
    assert importers(tuple(f"megatron_ft/{part}" for part in NO_TORCH), {"torch", "megatron"}) == []


def test_only_the_door_and_tools_import_hydra() -> None:
    assert importers(("megatron_ft", "benchmarks"), {"hydra", "omegaconf"}) == []


def test_only_mcore_imports_megatron() -> None:
    outside = [line for line in importers(("megatron_ft", "tools"), {"megatron"}) if "megatron_ft/mcore/" not in line]
    assert outside == []


def test_only_mcore_imports_the_extension() -> None:
    found = importers(("megatron_ft", "tools", "pretrain_moe.py"), {EXTENSION.name})
    assert [line for line in found if not line.startswith("megatron_ft/mcore/")] == []
    assert importers((EXTENSION.name,), {"megatron_ft", "megatron", "hydra", "omegaconf"}) == []


def test_only_tests_benchmarks_and_tools_use_testing() -> None:
    """The launcher names the entry of ranks that follow a schedule, but imports nothing of ``testing``."""
    files = [path for path in python_files("megatron_ft", "pretrain_moe.py") if PACKAGE / "testing" not in path.parents]
    assert [name(path) for path in files if any(is_inside(used, "megatron_ft.testing") for used in uses(path))] == [
        "megatron_ft/control/launcher.py"
    ]


@pytest.mark.parametrize(("folder", "other"), [("tests", "benchmarks"), ("benchmarks", "tests")])
def test_tests_and_benchmarks_do_not_import_each_other(folder: str, other: str) -> None:
    """``megatron_ft.testing``, which both use, imports neither of them."""
    files = python_files(folder, "megatron_ft/testing")
    assert [f"{name(path)}: {used}" for path in files for used in uses(path) if is_inside(used, other)] == []


def uses(path: Path) -> Iterator[str]:
    """Return the names of the modules that a file imports or names in a string."""
    yield from imports(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (match.group(1) for match in IMPORT_IN_TEXT.finditer(node.value))
            if MODULE_NAME.fullmatch(node.value):
                yield node.value.partition(":")[0]


def is_inside(module: str, package: str) -> bool:
    """Return whether a module is the package or inside it."""
    return f"{module}.".startswith(f"{package}.")


def test_no_circles_between_files(code_size: CodeSize) -> None:
    """Imports for type checking count too."""
    assert code_size.circular_modules == (), "these modules import each other, or something that does"


def test_no_function_takes_the_whole_trainer() -> None:
    files = [path for path in python_files("megatron_ft") if PACKAGE / "testing" not in path.parents]
    found = [
        f"{name(path)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.arg) and node.annotation is not None
        # What makes a trainer may be passed.
        if re.fullmatch(r"['\"]?(?:\w+\.)*\w*Trainer\b(?: \| None)?['\"]?", ast.unparse(node.annotation))
    ]
    assert found == []


def test_no_machine_paths() -> None:
    files = python_files("megatron_ft", "transformer_engine_ext", "tools", "benchmarks", "tests", *ENTRY)
    files += [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "conf").rglob("*.yaml")]
    files += [*(ROOT / "benchmarks" / "results").glob("*.json")]
    found = [
        f"{name(path)}: {match.group()}"
        for path in files
        if path != Path(__file__)
        for match in MACHINE_PATH.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_conf_files_are_yaml() -> None:
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    assert files, "conf/ is empty"
    for path in files:
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict | None), name(path)


def test_tests_are_named_after_what_they_test() -> None:
    stray = [
        name(path)
        for path in (ROOT / "tests" / "unit").iterdir()
        # A folder that has moved leaves its compiled files behind.
        if any(path.rglob("*.py")) and path.name not in ("tools", EXTENSION.name) and not (PACKAGE / path.name).exists()
    ]
    assert stray == []


def test_docs_index_names_every_page() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(page for page in pages if f"({page})" not in text) == []


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
