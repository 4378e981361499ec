"""Tests that every key has a documentation line, a type and a default."""

from megatron_ft.config.docs import group_docs, key_docs


def test_every_key_is_documented() -> None:
    docs = key_docs()
    assert len(docs) > 100
    assert [doc.key for doc in docs if not doc.doc or not doc.type] == []


def test_defaults_are_written_as_yaml() -> None:
    defaults = {doc.key: doc.default for doc in key_docs()}
    assert defaults["model.num_query_groups"] == "null"
    assert defaults["checkpoint.async_save"] == "true"
    assert defaults["data.train"] == "['python-stdlib']"


def test_every_group_is_documented() -> None:
    docs = group_docs()
    assert set(docs) >= {"model", "parallel", "launch", "run"} and all(docs.values())


def test_the_documentation_of_a_group_is_the_first_paragraph_in_one_line() -> None:
    docs = group_docs()
    assert docs["model"].endswith("Keys have the names of Megatron-Core.")  # wrapped in the source
    assert docs["data"] == "Sources of tokens, and the tokenizer."  # followed by another paragraph
    assert not any("\n" in text for text in docs.values())
