"""The live board's script: its own tests, its size, and that text stays text in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import ddp_notebook

FOLDER = Path(ddp_notebook.__file__).parent / "board"
TESTS = Path(__file__).parents[1] / "js"
MOST_BYTES = 66_000


def test_the_pure_functions_pass_their_own_tests() -> None:
    node = shutil.which("node")
    if node is None:
        why = "no node here: apt-get install nodejs"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    scripts = sorted(map(str, TESTS.glob("*.test.js")))
    assert scripts
    shown = subprocess.run(
        [node, "--experimental-default-type=module", "--test", *scripts],
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stdout[-8000:] + shown.stderr[-2000:]


def test_script_and_style_are_small_and_load_nothing() -> None:
    script, style = (FOLDER / name for name in ("board.js", "board.css"))
    assert script.stat().st_size + style.stat().st_size < MOST_BYTES
    source = script.read_text("utf-8")
    assert not re.search(r"\bimport\b\s*[({\"'*]|\bimport \w+ from", source)
    links = re.findall(r"https?://[^\s\"'`]+", source + style.read_text("utf-8"))
    assert set(links) <= {"http://www.w3.org/2000/svg"}


def test_the_script_knows_no_way_to_make_markup_of_text() -> None:
    source = (FOLDER / "board.js").read_text("utf-8")
    code = re.sub(r"//.*", "", source)
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert way not in code
