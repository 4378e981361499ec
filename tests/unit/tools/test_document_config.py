"""Tests that docs/configuration.md equals the present docstrings."""

from megatron_ft.config.docs import key_docs
from tools import document_config


def test_the_page_is_up_to_date() -> None:
    assert document_config.main(["--check"]) == 0, "run python -m tools.document_config"


def test_the_page_has_every_key_once() -> None:
    page = document_config.page()
    assert [page.count(f"| `{doc.key}` |") for doc in key_docs()] == [1] * len(key_docs())
