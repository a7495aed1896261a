"""Whose line a warning is shown at."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from ddp_notebook.rank.cells.warning_places import WarningPlaces
from ddp_notebook.rank.training.patching import Patches


class Library:
    """A class of torch's, as it were."""

    def deprecated(self) -> None:
        """Warn at the line of the caller."""
        warnings.warn("it goes", FutureWarning, stacklevel=2)


def raise_again(error: Exception) -> None:
    raise error


def test_a_warning_through_a_stand_in_is_shown_at_the_users_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Library, "deprecated", Library.deprecated)
    Patches(lambda: False, raise_again).patch(Library, "deprecated", after=lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        WarningPlaces().attach()
        Library().deprecated()
        warnings.warn("my own", UserWarning, stacklevel=1)
    lines = Path(__file__).read_text().splitlines()
    assert [each.filename for each in caught] == [__file__, __file__]
    assert lines[caught[0].lineno - 1].strip() == "Library().deprecated()"
    assert "my own" in lines[caught[1].lineno - 1]
