"""A function of a module that is not imported yet: found by its name, and nothing is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddp_notebook.rank.debugger.source import to_come

FILES = {
    "tocome/__init__.py": "from .inner.model import Net as Model\nfrom tocome.tools import step\n",
    "tocome/inner/__init__.py": "raise RuntimeError('imported')\n",
    "tocome/inner/model.py": (
        "class Net:\n    def __init__(self):\n        self.x = 1\n    def forward(self, x):\n"
        '        """What it does."""\n        return x\nclass Bare:\n    def __init__(self):\n'
        "        self.x = 1\ndef outer():\n    def inner():\n        return 1\n    return inner\n"
    ),
    "tocome/tools.py": "import functools\n@functools.cache\ndef step():\n    return 1\n",
    "tocome/broken.py": "def step(:\n",
    "tocome_alone.py": "async def main():\n    pass\n",
    "tocome_space/part.py": "def run():\n    return 2\n",
}


@pytest.mark.parametrize(
    ("name", "file", "line"),
    [
        ("tocome.inner.model.Net.forward", "tocome/inner/model.py", 6),
        ("tocome.inner.model.Net", "tocome/inner/model.py", 6),
        ("tocome.inner.model.Bare", "tocome/inner/model.py", 9),
        ("tocome.inner.model.outer.inner", "tocome/inner/model.py", 12),
        ("tocome.Model.forward", "tocome/inner/model.py", 6),
        ("tocome.step", "tocome/tools.py", 4),
        ("tocome.tools.step", "tocome/tools.py", 4),
        ("tocome_alone.main", "tocome_alone.py", 2),
        ("tocome_space.part.run", "tocome_space/part.py", 2),
        ("tocome.tools.walk", "tocome/tools.py", 0),
        ("tocome.broken.step", "tocome/broken.py", 0),
        ("tocome.inner.Net", "tocome/inner/__init__.py", 0),
        ("tocome_not_there.step", "", 0),
        ("math.sqrt", "", 0),
        ("step", "", 0),
    ],
)
def test_it_is_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, line: int
) -> None:
    for each, text in FILES.items():
        path = tmp_path / each
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    expected = (str(tmp_path / file), line) if file else ("", 0)
    assert to_come(name) == expected
    assert not [module for module in sys.modules if module.startswith("tocome")]
