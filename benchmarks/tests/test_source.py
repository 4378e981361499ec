"""Tests that the digest of a claim covers the files that its script uses, and no other files."""

from pathlib import Path

import pytest

from benchmarks.claims import load_claims
from benchmarks.source import ROOT, source_digest, used_files

FILES = {
    "benchmarks/__init__.py": "",
    "benchmarks/script.py": "import json\nfrom megatron_ft import used\nfrom .beside import name\n",
    "benchmarks/beside.py": 'WARM = "megatron_ft.warm:start"\nname = "pretrain_moe.py"\n',
    "benchmarks/other.py": "",
    "benchmarks/claims.yaml": "claims: []",
    "conf/model/small.yaml": "_target_: megatron_ft.planned.Planner\n",
    "megatron_ft/__init__.py": "",
    "megatron_ft/used.py": 'def late():\n    import megatron_ft.late.part\n    "megatron_ft.unused is only named"\n',
    "megatron_ft/late/__init__.py": "",
    "megatron_ft/late/part.py": "",
    "megatron_ft/planned.py": "",
    "megatron_ft/warm.py": "",
    "megatron_ft/unused.py": "",
    "pretrain_moe.py": 'CONF = "conf"\n',
    "requirements/constraints.txt": "torch==2.13.0\n",
}
UNUSED = {"benchmarks/other.py", "benchmarks/claims.yaml", "megatron_ft/unused.py"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_that_are_imported_or_named_are_used(tree: Path) -> None:
    found = used_files(tree / "benchmarks" / "script.py", root=tree)
    assert {path.relative_to(tree).as_posix() for path in found} == FILES.keys() - UNUSED


@pytest.mark.parametrize("name", FILES)
def test_the_digest_changes_with_the_files_that_are_used(tree: Path, name: str) -> None:
    script = tree / "benchmarks" / "script.py"
    before = source_digest(script, root=tree)
    assert source_digest(script, root=tree) == before
    (tree / name).write_text(FILES[name] + "\nchanged = 1\n")
    assert (source_digest(script, root=tree) == before) == (name in UNUSED)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (
            '"""Other text."""\n\nA = """b  # c"""\n"""About A."""\n\n\ndef f():\n    """Do it."""\n    return A\n',
            False,
        ),
        ('A = """b  # c"""\n# why\ndef f():\n    # why\n    return A\n', False),
        ('A = """b  # c"""  # why\ndef f():\n    return A # "why"\n', False),
        ('A = """b  # c\n# why"""\ndef f():\n    return A\n', True),
        ('A = """b  # d"""\ndef f():\n    return A\n', True),
        ('A = """b  # c"""\ndef f():\n    "A"\n    return "A"\n', True),
    ],
)
def test_comments_and_docstrings_do_not_change_the_digest(tree: Path, text: str, changes: bool) -> None:
    script = tree / "benchmarks" / "script.py"
    (tree / "megatron_ft" / "used.py").write_text('A = """b  # c"""\ndef f():\n    return A\n')
    before = source_digest(script, root=tree)
    (tree / "megatron_ft" / "used.py").write_text(text)
    assert (source_digest(script, root=tree) != before) == changes


def test_jobs_use_the_training_loop_and_planners_do_not() -> None:
    claims = load_claims()
    used = {
        name: {path.relative_to(ROOT).as_posix() for path in used_files(ROOT / claims[name].script)}
        for name in ("elastic-bitwise", "balance", "seeded-faults")
    }
    loop, slurm = "megatron_ft/mcore/training/engine.py", "megatron_ft/control/slurm/batch_job.py"
    assert loop in used["elastic-bitwise"] and loop not in used["balance"]
    assert "megatron_ft/testing/jobs.py" in used["elastic-bitwise"]
    assert slurm not in used["balance"]
    assert {loop, slurm, "benchmarks/tests/test_source.py"} <= used["seeded-faults"]
    assert all("conf/config.yaml" in files for files in used.values())
