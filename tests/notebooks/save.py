"""Run notebooks from top to bottom and save what they show, as a reader is to see it.

    python tests/notebooks/save.py [NAME ...]     such as 02; all by default

What is left out of the saved outputs: widgets (there is no kernel behind them; the picture
beside each one is kept), live regions in which nothing came, the times of the run, and where the
session's temporary folder was.
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
WIDGET = "application/vnd.jupyter.widget-view+json"
_NOTHING = {"text/plain": ""}
"""Where a cell that took a moment would have shown its output, and had none."""


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
    notebook = nbformat.reads(_FOLDER_OF_SESSION.sub("…", json.dumps(notebook)), as_version=4)
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET, None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("data") != _NOTHING]
    return notebook


if __name__ == "__main__":
    wanted = sys.argv[1:] or [""]
    for each in sorted(FOLDER.glob("*.ipynb")):
        if any(each.name.startswith(name) for name in wanted):
            print(f"{each.name}: {save(each):.0f} s", flush=True)
