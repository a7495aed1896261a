"""What ssh is given to start an agent, and what an agent says of its host's room."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from ddp_notebook.errors import UsageMistake
from ddp_notebook.launch import agent
from ddp_notebook.launch.ssh_hosts import SSH_VARIABLE, ssh_command, tunneled

CONNECTION = {
    "interface": "tcp://127.5.6.7",
    "control": 41001,
    "mux": 41002,
    "broadcast": [41003, 41004],
    "key": "secret",
    "location": "laptop",
    "curve_serverkey": None,
    "fast": True,
}
Usage = namedtuple("Usage", "free")


def test_every_port_of_the_controller_comes_to_loopback_there() -> None:
    there, forwards = tunneled(CONNECTION)
    moved = [there["control"], there["mux"], *there["broadcast"]]
    assert forwards[::2] == ["-R"] * 4
    assert forwards[1::2] == [
        f"127.0.0.1:{port}:127.5.6.7:{own}"
        for port, own in zip(moved, (41001, 41002, 41003, 41004), strict=True)
    ]
    assert len({*moved}) == 4
    assert all(20_000 <= port < 32_000 for port in moved)
    assert (there["interface"], there["location"]) == ("tcp://127.0.0.1", "")
    assert (there["key"], there["fast"]) == ("secret", True)
    assert "secret" not in " ".join(forwards)
    assert tunneled(CONNECTION)[0] != there  # two sessions do not want the same ports


def test_the_users_ssh_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SSH_VARIABLE, raising=False)
    assert ssh_command() == ("ssh",)
    monkeypatch.setenv(SSH_VARIABLE, "ssh -F 'my file' -J login")
    assert ssh_command() == ("ssh", "-F", "my file", "-J", "login")
    monkeypatch.setenv(SSH_VARIABLE, "ssh -F 'my file")
    with pytest.raises(UsageMistake, match="is not a command: No closing quotation"):
        ssh_command()


@pytest.mark.parametrize(
    ("free_bytes", "files", "said"),
    [
        (1 << 30, 1000, ""),
        (1 << 30, None, ""),
        (1 << 20, 1000, " has only "),
        (1 << 30, 5, " has no room for more files"),
    ],
)
def test_a_host_says_where_a_sessions_files_do_not_fit(
    free_bytes: int, files: int | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free_bytes))
    monkeypatch.setattr(agent, "files_left", lambda _: files)
    why = agent._why_no_room(tmp_path / "folder")
    assert (said in why) if said else why == ""
    assert not why or why.startswith(str(tmp_path))


def test_ranks_start_where_they_are_told_else_in_the_notebooks_folder_else_at_home(
    tmp_path: Path,
) -> None:
    status = tmp_path.stat()
    state = [status.st_ino, status.st_mtime_ns]

    def chosen(path: Path, state: list[int], wanted: str = "") -> tuple[str, bool]:
        current = {"path": str(path), "state": state}
        return agent._current_folder({"current_folder": current, "wanted_folder": wanted})

    home = str(Path.home())
    assert chosen(tmp_path, state) == (str(tmp_path), True)
    assert chosen(tmp_path, [1, 2]) == (str(tmp_path), False)
    assert chosen(tmp_path / "absent", state) == (home, False)
    assert chosen(tmp_path / "absent", state, "/usr") == ("/usr", False)
    with pytest.raises(NotADirectoryError, match="no folder /no/such, which --folder names"):
        chosen(tmp_path, state, "/no/such")
