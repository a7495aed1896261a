"""Run notebooks from top to bottom and save what they show, as a reader is to see it.

    python tests/notebooks/save.py [NAME ...]     such as 02; all by default

What is left out of the saved outputs: widgets (there is no kernel behind them; the picture
beside each one is kept), the times of the run, what stands there only when a cell took long, and
where the session's temporary folder, the installed libraries and this package were.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).parents[2] / "notebooks"
CELL_TIMEOUT_S = 200
_FOLDER_OF_SESSION = re.compile(r"(?:/[\w.-]+)+/ddp_notebook-\w+")
_FOLDER_OF_LIBRARIES = re.compile(r"(?:/[\w.-]+)+/(?:site-packages|lib/python3\.\d+)(?=/)")
_FOLDER_OF_SOURCE = re.compile(re.escape(str(FOLDER.parent)) + "(?=/ddp_notebook/)")
"""Where the package is when it is installed in place."""
_LEFT_BEHIND = re.compile(
    r"((finished in|did not finish; it ran for) [\d.]+ s"
    r"|stopped after [\d.]+ s: no rank can continue)?"
)
"""What is left of the live output of a cell that took long; one that was quick shows none."""
WIDGET = "application/vnd.jupyter.widget-view+json"


def save(path: Path) -> float:
    """Execute a notebook and save it; how long that took, in seconds."""
    notebook = nbformat.read(path, as_version=4)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(
            notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources=resources
        ).execute()
    took_s = time.monotonic() - began_s
    notebook = clean(notebook)
    nbformat.write(notebook, path)
    return took_s


def clean(notebook: Any) -> Any:
    """The notebook as it is saved."""
    source = json.dumps(notebook)
    for folder in (_FOLDER_OF_SESSION, _FOLDER_OF_LIBRARIES, _FOLDER_OF_SOURCE):
        source = folder.sub("…", source)
    notebook = nbformat.reads(source, as_version=4)
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET, None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _says_nothing(output)]
    return notebook


def _says_nothing(output: Any) -> bool:
    data = output.get("data", {})
    only_text = output.output_type == "display_data" and set(data) <= {"text/plain"}
    return bool(only_text and _LEFT_BEHIND.fullmatch(data.get("text/plain", "")))


if __name__ == "__main__":
    wanted = sys.argv[1:] or [""]
    for each in sorted(FOLDER.glob("*.ipynb")):
        if any(each.name.startswith(name) for name in wanted):
            print(f"{each.name}: {save(each):.0f} s", flush=True)
