"""The scripts on the categories' pages, as torchrun runs them: broken they are found."""

from __future__ import annotations

from pathlib import Path

import page_programs
import pytest

from ddp_notebook.model import Category
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("category", page_programs.shown("script"))
def test_a_script_is_found_and_runs_once_it_is_changed_as_its_page_says(
    ranks3: Session, category: Category, tmp_path: Path
) -> None:
    page_programs.check(ranks3, category, tmp_path)
