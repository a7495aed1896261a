"""What a rank changed in the file system, and what was not there for it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ddp_notebook.rank.cells.raised import missing_path
from ddp_notebook.rank.component import Run
from ddp_notebook.rank.inspect.frames import raised_by_handler
from ddp_notebook.rank.inspect.paths_changed import PathsChanged


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[PathsChanged]:
    for module in (torch, torch.serialization):
        monkeypatch.setattr(module, "save", torch.save)  # put back afterwards
    heard = PathsChanged()
    heard.attach()
    yield heard


def test_what_is_written_made_and_removed_is_known_by_its_whole_path(
    changed: PathsChanged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed.run_begins(Run(1))
    Path("run/1").mkdir(parents=True)
    Path("run/1/a.json").write_text("[]")
    Path("run/1/a.json").read_text()
    Path("run/1/a.json").replace("run/1/b.json")
    torch.save({"a": 1}, "run/1/c.pt")
    shutil.rmtree("run/1")
    found = [(what, str(Path(path).relative_to(tmp_path))) for what, path in changed.last()]
    assert [each for each in found if each[0] == "made"] == [("made", "run"), ("made", "run/1")]
    assert ("removed", "run/1/a.json") in found and ("written", "run/1/b.json") in found
    assert ("written", "run/1/c.pt") in found
    assert found[-1] == ("removed", "run/1")
    changed.run_begins(Run(2))
    assert changed.last() == []


def test_a_run_that_changes_much_is_known_by_its_last_changes(
    changed: PathsChanged, tmp_path: Path
) -> None:
    for number in range(100):
        (tmp_path / str(number)).write_text("")
        (tmp_path / "log").write_text("")
    last = changed.last()
    assert len(last) <= 30 and last[-1] == ("written", str(tmp_path / "log"))


def test_what_was_not_there_is_known_of_errors_that_say_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as lacking:
        (tmp_path / "a").read_text()
    assert missing_path(lacking.value) == str(tmp_path / "a")
    with pytest.raises(RuntimeError) as by_torch:
        torch.save({}, tmp_path / "no" / "a.pt")
    assert missing_path(by_torch.value) == str(tmp_path / "no")
    assert missing_path(FileNotFoundError("nothing more")) == ""
    assert missing_path(KeyError("/a")) == ""


def test_an_error_that_a_handler_of_a_signal_raises_is_told_from_one_of_ours() -> None:
    def handler(number: int, frame: object) -> None:
        raise RuntimeError("a worker has died")

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(RuntimeError) as error:
            signal.raise_signal(signal.SIGUSR2)
        assert raised_by_handler(error.value)
        with pytest.raises(RuntimeError) as own:
            raise RuntimeError("ours")
        assert not raised_by_handler(own.value)
    finally:
        signal.signal(signal.SIGUSR2, before)
