"""A saved notebook as a page with no kernel: by @jupyter-widgets/html-manager, as nbviewer and
nbconvert's pages have it, and where that cannot be loaded. Nothing here comes from the network.

VS Code, Colab and others have managers of their own on the same base: this is as near to them as
can be had without them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anywidget
import nbformat
import pytest
from boards import Board
from kernels import execute
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, Page, Route, expect
from support import lacking

pytestmark = pytest.mark.timeout(240)

HOSTILE = "</script><img src=x onerror=window.hurt=1><script>window.hurt=1</script>"
HANG = f"""%%ddp
if rank == 1:
    dist.barrier()              # {HOSTILE}
dist.all_reduce(torch.ones(3))  # {HOSTILE}"""
CELLS = [
    "%load_ext ddp_notebook",
    "%ddp_init --world-size 2 --device cpu --board here",
    HANG,
    "%ddp_why",
]
PAGE = "http://saved.invalid/"
RENDER = """
require(["@jupyter-widgets/html-manager/dist/libembed-amd"], (embed) => embed.renderWidgets());"""
"""What html-manager's embed-amd.js has beside libembed-amd.js."""
STATE = "application/vnd.jupyter.widget-state+json"


@pytest.fixture(scope="module")
def saved(nothing_left_behind_by_the_module: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A notebook whose ranks hang, saved with the state of its widgets."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in CELLS])
    execute(notebook, tmp_path_factory.mktemp("saved"), 120, allow_errors=True)
    models = notebook.metadata["widgets"][STATE]["state"].values()
    assert "AnyModel" in {each["model_name"] for each in models}
    return notebook


@pytest.fixture(scope="module")
def scripts() -> Mapping[str, str]:
    """What nbconvert's page loads from the network, as installed here; by a part of its name."""
    statics = Path(anywidget.__file__).parent / "nbextension"
    embed = installed("shinywidgets") / "static" / "libembed-amd.js"
    require = installed("shiny") / "www" / "shared" / "requirejs" / "require.min.js"
    return {
        r"/require\.min\.js$": require.read_text("utf-8"),
        r"/@jupyter-widgets/html-manager@.*/embed-amd\.js$": embed.read_text("utf-8") + RENDER,
        r"/anywidget@.*/index\.js$": (statics / "index.js").read_text("utf-8"),
    }


def installed(package: str) -> Path:
    """The folder of a package that is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        why = f"{package} is not installed: pip install -e '.[test]'"
        lacking(why)
    return Path(found.submodule_search_locations[0])


@contextlib.contextmanager
def shown(
    notebook: Any, scripts: Mapping[str, str], browser: Browser, picture: Path
) -> Iterator[Page]:
    """The notebook as nbconvert's page, in a browser that is given `scripts` and nothing else."""
    html, _ = HTMLExporter().from_notebook_node(notebook)

    def answer(route: Route) -> None:
        url = route.request.url
        found = next((text for part, text in scripts.items() if re.search(part, url)), None)
        if url == PAGE:
            route.fulfill(content_type="text/html", body=html)
        elif found is not None:
            anyone = {"access-control-allow-origin": "*"}
            route.fulfill(content_type="text/javascript", body=found, headers=anyone)
        else:
            route.abort()

    page = browser.new_page(viewport={"width": 1000, "height": 1200})
    page.route("**/*", answer)
    try:
        page.goto(PAGE)
        yield page
    finally:
        page.screenshot(path=picture)
        page.close()


def test_html_manager_shows_the_board_of_a_saved_notebook(
    saved: Any, scripts: Mapping[str, str], browser: Browser, tmp_path: Path
) -> None:
    with shown(saved, scripts, browser, tmp_path / "page.png") as page:
        board = Board(page)
        expect(board.rows).to_have_count(2)
        # As the cell ended in which it stands: the hang is in the output of its own cell.
        board.await_roles("ready", "ready")
        expect(board.finding).to_have_count(0)
        expect(page.locator("body")).to_contain_text("Only rank 1 calls barrier")
        expect(page.locator(".ddp-board")).to_be_hidden()  # the picture: the board stands for it
        # There is no kernel: it says so, and has nothing to press.
        gone = board.el.locator(".ddpb-gone")
        expect(gone).to_contain_text("This board was saved")
        expect(board.el.locator(".ddpb-actions")).to_be_hidden()
        expect(board.el.locator(".ddpb-run")).to_have_count(0)
        assert page.evaluate("window.hurt") is None


@pytest.mark.parametrize("missing", ["", "anywidget"], ids=["offline", "without-anywidget"])
def test_where_scripts_cannot_be_loaded_the_picture_is_shown(
    saved: Any, scripts: Mapping[str, str], browser: Browser, tmp_path: Path, missing: str
) -> None:
    left = {part: text for part, text in scripts.items() if missing and missing not in part}
    with shown(saved, left, browser, tmp_path / "page.png") as page:
        picture = page.locator(".ddp-board").first  # in place of an empty box
        expect(picture).to_be_visible()
        expect(picture).to_contain_text("✓ ready")
        expect(page.locator(".ddpb")).to_have_count(0)
        assert page.evaluate("window.hurt") is None


def test_a_notebook_saved_without_the_state_of_widgets_shows_the_picture(
    saved: Any, scripts: Mapping[str, str], browser: Browser, tmp_path: Path
) -> None:
    """So JupyterLab saves by default."""
    notebook = nbformat.from_dict(json.loads(json.dumps(saved)))
    del notebook.metadata["widgets"]
    with shown(notebook, scripts, browser, tmp_path / "page.png") as page:
        expect(page.locator(".ddp-board").first).to_contain_text("✓ ready")
        expect(page.locator(".ddpb")).to_have_count(0)
        assert page.evaluate("window.hurt") is None
