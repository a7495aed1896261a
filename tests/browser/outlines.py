"""The outline of a live board, as its accessibility tree has it, compared with one that is saved.

What differs between runs and machines is left out: times, ports, process ids, host names. To save
them anew, after a look at what changed: DDP_RENEW_OUTLINES=1 pytest tests/browser/test_outlines.py
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

from playwright.sync_api import Locator

FOLDER = Path(__file__).parent / "outlines"
WITHIN_S = 60.0
RENEW = bool(os.environ.get("DDP_RENEW_OUTLINES"))

VARIES = (
    (re.compile(r" \[(?:active|cursor=\w+|ref=\w+)\]"), ""),
    (re.compile(r"(?:< )?\b\d+(?:\.\d+)? (?:µs|ms|s|min|h)\b"), "TIME"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "CLOCK"),
    (re.compile(r"127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"MASTER_PORT=\d+"), "MASTER_PORT=N"),
    (re.compile(r"\bpid \d+"), "pid N"),
    (re.compile(rf"\b{re.escape(socket.gethostname())}\b"), "HOST"),
    # Sampled once a second while the board is watched, so not there at first.
    (re.compile(r"\n *- text: CPU [▁-█\d].*"), ""),
    (re.compile(r"'?(listitem \"[^\"\n]*HOST)[^\"\n]*CPU [▁-█\d][^\"\n]*\"'?"), r'\1"'),
)

CONTRASTS = """el => {
  const style = getComputedStyle(el);
  const brush = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const light = (name) => {
    brush.fillStyle = style.getPropertyValue(name);
    brush.fillRect(0, 0, 1, 1);
    const part = (of) => (of / 255 <= 0.04045 ? of / 3294.6 : ((of / 255 + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...brush.getImageData(0, 0, 1, 1).data].map(part);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  };
  const paper = light("--ddpb-paper");
  const names = ["ink", "bad", "warn", "busy", "ok", "paused", "idle", "a", "b", "c", "d"];
  return names.map((name) => {
    const each = light(`--ddpb-${name}`);
    return [name, Math.max(each, paper) / Math.min(each, paper)];
  });
}"""
"""How far the colours of a board are from what is behind them, as WCAG counts it: 1 to 21."""


def outline(board: Locator) -> str:
    """Its regions, rows, buttons and words."""
    text = board.aria_snapshot()
    for varies, word in VARIES:
        text = varies.sub(word, text)
    return text + "\n"


def contrasts(board: Locator) -> str:
    """Its theme, and for each colour what it may be used for by WCAG."""
    dark = board.evaluate("() => document.body.dataset.jpThemeLight === 'false'")
    lines = [f"theme: {'dark' if dark else 'light'}"]
    for name, ratio in board.evaluate(CONTRASTS):
        uses = (("text, AAA", 7.0), ("text, AA", 4.5), ("large text and shapes", 3.0))
        use = next((use for use, least in uses if ratio >= least), "nothing that must be seen")
        lines.append(f"{name}: {use}")
    return "\n".join(lines) + "\n"


def check(name: str, seen: Callable[[], str]) -> None:
    """Wait until what is seen is what is saved as `name`; or save it, when that is asked for."""
    path = FOLDER / f"{name}.yml"
    if RENEW:
        path.write_text(seen(), "utf-8")
    saved = path.read_text("utf-8")
    deadline_s = time.monotonic() + WITHIN_S
    while (found := seen()) != saved and time.monotonic() < deadline_s:
        time.sleep(0.2)
    lines = unified_diff(saved.splitlines(), found.splitlines(), "saved", "found", "", "", 0, "")
    assert found == saved, f"{path.name}, which outlines.py can save anew: {' | '.join(lines)}"
