"""Every claim has its script, and pages name only claims that exist."""

import re

from benchmarks.claims import load_claims
from benchmarks.source import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_claims_have_scripts() -> None:
    for claim in load_claims().values():
        assert (ROOT / f"{claim.module.replace('.', '/')}.py").exists(), f"{claim.id}: no {claim.module}"
        assert claim.module == f"benchmarks.{claim.id.replace('-', '_')}"


def test_pages_name_only_claims() -> None:
    named = {name for page in PAGES for name in re.findall(r"ID=([a-z][\w-]*)", page.read_text(encoding="utf-8"))}
    assert sorted(named - load_claims().keys()) == []
