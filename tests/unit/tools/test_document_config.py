"""Tests that docs/configuration.md equals the present docstrings, and docs/recovery.md the present requirements."""

from megatron_ft.config.docs import key_docs
from megatron_ft.config.requirements import REQUIREMENTS
from tools import document_config


def test_the_pages_are_up_to_date() -> None:
    assert document_config.main(["--check"]) == 0, "run python -m tools.document_config"


def test_the_page_has_every_key_once() -> None:
    page = document_config.page()
    assert [page.count(f"| `{doc.key}` |") for doc in key_docs()] == [1] * len(key_docs())


def test_each_requirement_names_what_is_missing() -> None:
    rows = document_config.recovery_page().splitlines()
    for name, requirements in REQUIREMENTS.items():
        for requirement in requirements:
            (row,) = [row for row in rows if row.startswith(f"| `{name}` | `{requirement.key}` |")]
            assert requirement.reason and row.endswith(f"| {requirement.demand} | {requirement.reason} |")
