"""`%ddp_why --explain`: each category has its page, and a page says something."""

from __future__ import annotations

import dataclasses

import pytest

from ddp_notebook.diagnosis import pages
from ddp_notebook.model import Category


@pytest.mark.parametrize("category", Category)
def test_each_category_has_a_page_in_sentences(category: Category) -> None:
    for text in dataclasses.astuple(pages.PAGES[category]):
        assert text.rstrip("»").endswith("."), text
    shown = pages.text(category)
    assert shown.startswith(f"{category.value}\n\nWhat torch prints ")
    assert max(map(len, shown.splitlines())) < 300
