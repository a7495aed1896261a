"""`ddp-notebook demo`: what it copies, keeps, prints and returns."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbformat.v4 import new_code_cell, new_notebook

from ddp_notebook import __main__

TUTORIAL = "01_first_light.ipynb"


@pytest.fixture
def notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package's notebooks, with one quick notebook."""
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr(__main__, "_notebooks_folder", lambda: folder)
    write(folder, "print('accuracy 99 %')")
    return folder


def write(folder: Path, source: str) -> None:
    """Put a notebook of one cell, tagged as the tutorial's, into `folder`."""
    cell = new_code_cell(source, metadata={"tags": ["accuracy"]})
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(new_notebook(cells=[cell], metadata=metadata), folder / "01_quick.ipynb")


def test_the_tutorials_of_a_checkout_are_found() -> None:
    assert TUTORIAL in {path.name for path in __main__._notebooks_folder().iterdir()}


def test_the_tutorials_are_copied_into_a_new_folder(tmp_path: Path) -> None:
    copies = __main__.copy_notebooks(tmp_path / "new" / "demo")
    assert copies[0] == tmp_path / "new" / "demo" / TUTORIAL
    assert all(copy.exists() for copy in copies)
    assert (copies[0].parent / "INSTRUCTOR.md").exists()
    assert (copies[0].parent / "solutions" / copies[0].with_suffix(".md").name).exists()


def test_a_class_gets_the_drawings_and_no_solutions(tmp_path: Path) -> None:
    copies = __main__.copy_notebooks(tmp_path, solutions=False)
    assert not (tmp_path / "solutions").exists()
    assert not (tmp_path / "INSTRUCTOR.md").exists()
    for copy in copies:
        for drawing in re.findall(r"\]\((images/[^)]+)\)", copy.read_text("utf-8")):
            assert (tmp_path / drawing).exists(), copy.name


def test_a_notebook_that_there_is_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["demo", "--at", "13"]) == __main__.WRONG_USAGE
    assert "There is no notebook 13: --at takes 1 to 12." in capsys.readouterr().err


def test_a_notebook_that_is_there_is_kept_and_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = tmp_path / TUTORIAL
    notebook.write_text("edited")
    __main__.copy_notebooks(tmp_path)
    assert notebook.read_text() == "edited"
    assert f"notebooks in {tmp_path}, 1 kept as they were" in capsys.readouterr().out


def test_a_folder_that_is_a_file_is_refused_with_the_call_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo").write_text("")
    assert __main__.main(["demo", "--headless", "--dir", str(tmp_path / "demo")]) == 3
    assert "ddp-notebook demo --dir my-demo" in capsys.readouterr().err


def test_the_headless_demo_prints_what_the_notebook_found_and_writes_it_beside(
    notebooks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(["demo", "--headless", "--dir", str(tmp_path / "demo")]) == 0
    out = capsys.readouterr().out
    assert "1 of 1" in out
    assert "accuracy 99 %" in out
    executed = nbformat.read(tmp_path / "demo" / "01_quick.executed.ipynb", as_version=4)
    assert executed.cells[0].outputs[0].text == "accuracy 99 %\n"


def test_the_headless_demo_fails_when_a_claim_does_not_hold(
    notebooks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(notebooks, "print('accuracy 12 %')\nassert False, 'over 90 % was claimed'")
    assert __main__.main(["demo", "--headless", "--dir", str(tmp_path / "demo")]) == 1
    captured = capsys.readouterr()
    assert "accuracy 12 %" in captured.out
    assert "FAILED" in captured.out
    assert "over 90 % was claimed" in captured.err
    assert (tmp_path / "demo" / "01_quick.executed.ipynb").exists()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[socket.socket]]]:
    """Has another program take a port of the next kernels, between its choice and its use."""
    holders: list[socket.socket] = []
    write_its_ports = KernelManager.write_connection_file

    def take(kernels: int) -> list[socket.socket]:
        def taking(manager: KernelManager, **options: object) -> None:
            if len(holders) < kernels:
                holders.append(socket.create_server((manager.ip, manager.stdin_port)))
            write_its_ports(manager, **options)

        monkeypatch.setattr(KernelManager, "write_connection_file", taking)
        return holders

    yield take
    for holder in holders:
        holder.close()


def test_the_headless_demo_starts_another_kernel_when_one_finds_its_port_taken(
    notebooks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    taken: Callable[[int], list[socket.socket]],
) -> None:
    holders = taken(1)
    assert __main__.main(["demo", "--headless", "--dir", str(tmp_path / "demo")]) == 0
    assert len(holders) == 1
    assert "accuracy 99 %" in capsys.readouterr().out


def test_the_headless_demo_says_how_to_see_why_no_kernel_starts(
    notebooks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    taken: Callable[[int], list[socket.socket]],
) -> None:
    taken(99)
    assert __main__.main(["demo", "--headless", "--dir", str(tmp_path / "demo")]) == 3
    error = capsys.readouterr().err
    assert "The notebook's kernel did not start" in error
    assert f"{sys.executable} -m ipykernel_launcher" in error


@pytest.mark.parametrize(
    ("options", "missing", "named"),
    [
        ([], "jupyterlab", "jupyterlab"),
        (["--headless"], "nbclient", "nbclient"),
        (["--headless"], "sklearn", "scikit-learn"),
    ],
)
def test_what_the_demo_needs_is_named_with_the_command_to_type(
    options: list[str],
    missing: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = __main__.find_spec
    monkeypatch.setattr(
        __main__, "find_spec", lambda name: None if name == missing else there(name)
    )
    assert __main__.main(["demo", *options, "--dir", str(tmp_path / "demo")]) == 3
    error = capsys.readouterr().err
    assert f"The demo needs {named}, which this Python does not have." in error
    assert f'{sys.executable} -m pip install "ddp-notebook[demo]"' in error
    assert not (tmp_path / "demo").exists()


class Server:
    """Stands for Jupyter's server: it calls what it was given, as once it runs."""

    public_url = "http://localhost:8888/lab/tree/01_quick.ipynb?token=1"

    def __init__(self) -> None:
        self.web_app = SimpleNamespace(settings={})
        self.io_loop = SimpleNamespace(add_callback=lambda call: setattr(self, "start", call))
        self.log = logging.getLogger("stand-in")


@pytest.mark.parametrize("user", [0, 1000])
def test_it_says_where_it_is_and_starts_as_root_too(
    user: int,
    notebooks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a container one is root, and Jupyter would say "Use --allow-root to bypass"."""
    given: list[str] = []
    server = Server()
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr(
        "jupyterlab.labapp.LabApp.initialize_server", lambda words: given.extend(words) or server
    )
    assert __main__.main(["demo", "--dir", str(tmp_path / "demo"), "--port", "9999"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"1 notebook in {tmp_path / 'demo'}",
        f"Open {server.public_url}  (Ctrl-C ends it)",
    ]
    assert given[0] == str(tmp_path / "demo" / "01_quick.ipynb")
    assert given[-2:] == ["--port", "9999"], "what is not ours is JupyterLab's"
    assert ("--allow-root" in given) is (user == 0)
    [workspace] = (tmp_path / "demo" / ".workspaces").iterdir()
    layout = json.loads(workspace.read_text())["data"]["layout-restorer:data"]
    assert layout["left"]["collapsed"], "the list of files is folded at first"
    hook = server.web_app.settings["page_config_hook"]
    assert hook(None, {"disabledExtensions": ["theirs"]})["disabledExtensions"][0] == "theirs"


def test_options_that_nobody_takes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        __main__.main(["demo", "--headless", "--headles"])
    assert "unrecognized arguments: --headles" in capsys.readouterr().err


def test_the_console_script_knows_its_version() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "ddp_notebook", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == f"ddp-notebook {importlib.metadata.version('ddp-notebook')}"
