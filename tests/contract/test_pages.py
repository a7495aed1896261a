"""The cells on the categories' pages, on real ranks: broken they are found, corrected they run."""

from __future__ import annotations

from pathlib import Path

import page_programs
import pytest

from ddp_notebook.faults import FAULTS
from ddp_notebook.model import Category
from ddp_notebook.session import Session

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("category", page_programs.shown("cell"))
def test_a_cell_is_found_and_runs_once_it_is_changed_as_its_page_says(
    ranks3: Session, category: Category, tmp_path: Path
) -> None:
    page_programs.check(ranks3, category, tmp_path)


def test_all_other_pages_are_scripts_or_faults_of_the_lab_or_say_why_they_are_not_run() -> None:
    not_run = {category for category in Category if "not_run" in page_programs.page(category)}
    assert not_run == {"dataloader-shm", "gpu-mapping", "undecided"}
    faults = page_programs.shown("fault")
    run = {*page_programs.shown("cell"), *page_programs.shown("script"), *faults}
    assert run == set(Category) - not_run
    for category in faults:
        # tests/contract/test_faults.py injects and repairs each fault on real ranks.
        name = page_programs.page(category)["broken"].split()[-1]
        assert FAULTS[name].category is category
