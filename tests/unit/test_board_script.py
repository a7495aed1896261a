"""The live board's script: its own tests, its size, and that text stays text in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import lacking

import ddp_notebook
from ddp_notebook.board.widget import BoardWidget

PAGE = Path(ddp_notebook.__file__).parent / "board" / "page"
TESTS = Path(__file__).parents[1] / "js"
MOST_BYTES = 95_000


def joined(kind: str) -> str:
    files = sorted(PAGE.glob(f"*.{kind}"))
    assert files
    return "\n".join(path.read_text("utf-8") for path in files)


@pytest.mark.parametrize("squeezed", [False, True], ids=["written", "squeezed"])
def test_the_pure_functions_pass_their_own_tests(squeezed: bool, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        why = "no node here: apt-get install nodejs"
        lacking(why)
    scripts = sorted(map(str, TESTS.glob("*.test.js")))
    assert scripts
    environment = dict(os.environ)
    if squeezed:
        names = re.findall(r"^export (?:function|const|class) (\w+)", joined("js"), re.MULTILINE)
        built = tmp_path / "board.js"
        built.write_text(f"{BoardWidget._esm}\nexport {{ {', '.join(names)} }};\n", "utf-8")
        environment["BOARD_SCRIPT"] = str(built)
    shown = subprocess.run(
        [node, "--experimental-default-type=module", "--test", *scripts],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert shown.returncode == 0, shown.stdout[-8000:] + shown.stderr[-2000:]


def test_script_and_style_are_small_and_load_nothing() -> None:
    script, style = BoardWidget._esm, BoardWidget._css
    assert len(script.encode()) + len(style.encode()) < MOST_BYTES
    assert not re.search(r"\bimport\b\s*[({\"'*]|\bimport \w+ from", script)
    links = re.findall(r"https?://[^\s\"'`]+", script + style)
    assert set(links) <= {"http://www.w3.org/2000/svg"}


def test_the_script_knows_no_way_to_make_markup_of_text() -> None:
    code = re.sub(r"//.*", "", joined("js"))
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert way not in code
