"""The ranks' output: what each wrote so far, and which ranks wrote the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ddp_notebook.model import Output, OutputGroup, OutputItem, OutputKind, Ranks

_ADDRESS = re.compile(r"0x[0-9a-f]{8,}")
_LINE_END = re.compile(r"\r+\n")
STREAMS = (OutputKind.STDOUT, OutputKind.STDERR)
"""Output that continues where the last piece ended, perhaps in the middle of a line."""
_UP = "\x1b[A"
"""Moves the cursor up a line: tqdm writes it if bars are below each other."""
_MOVES = re.compile(r"(\n|\r|\x1b\[A)")
_OVERWRITES = re.compile(r"\n*(\r|\x1b\[A|\Z)")
"""The beginning of text that continues a line of progress bars."""
_BAR = re.compile(r"\d+%\|.*\||\d\S* \[\d+:\d\d")
"""A progress bar of tqdm: ``12%|#2  | 3/25 [00:01<00:08]``, or without a total ``3it [00:01``."""


class OutputLog:
    """One rank's output in a cell, as a list of items; consecutive text is one item."""

    def __init__(self) -> None:
        self._items: list[OutputItem] = []
        self._pieces: list[str] = []
        self._open = ""
        """The last item's text in a form to which text can be appended."""
        self._bar: tuple[int, str] | None = None
        """The item of stderr with progress bars below which something else was written, and its
        text in that form: the bars continue there."""
        self._clear_pending = False
        self.changes = 0
        """Increases with every change."""

    def add(self, output: Output) -> None:
        """Add one output event."""
        self.changes += 1
        if output.what is OutputKind.CLEAR:
            self._clear_pending = True
            if not output.update:  # clear_output(wait=False)
                self._clear()
            return
        if self._clear_pending:
            self._clear()
        if output.what in STREAMS:
            self._add_text(output)
            return
        self._join()
        item = OutputItem(output.what, output.text, output.data, output.metadata, output.display_id)
        if not output.update:
            self._items.append(item)
            return
        for index, old in enumerate(self._items):
            if item.display_id and old.display_id == item.display_id:
                self._items[index] = replace(item, what=old.what)

    def items(self) -> tuple[OutputItem, ...]:
        """The output so far."""
        self._join()
        return tuple(self._items)

    def _add_text(self, output: Output) -> None:
        below = self._items[-1].what if self._items else None
        over_bar = output.what is OutputKind.STDERR and below is OutputKind.STDOUT
        # A loop prints to stdout while its bar stands in stderr. Taken as they arrive, each print
        # would leave a bar behind and begin another one below; so what overwrites the bar goes on
        # where that is.
        if over_bar and self._bar is not None and _OVERWRITES.match(output.text):
            index, written = self._bar
            written += output.text
            self._items[index] = replace(self._items[index], text=apply_carriage_returns(written))
            self._bar = (index, resumable(written))
            return
        if below is not output.what:
            self._join()
            if below is OutputKind.STDERR:
                self._bar = (len(self._items) - 1, self._open) if "\r" in self._open else None
            self._open = ""
            self._items.append(OutputItem(output.what))
        self._pieces.append(output.text)

    def _join(self) -> None:
        if self._pieces:
            written = self._open + "".join(self._pieces)
            self._open = resumable(written)
            self._items[-1] = replace(self._items[-1], text=apply_carriage_returns(written))
            self._pieces = []

    def _clear(self) -> None:
        self._items, self._pieces, self._clear_pending, self._bar = [], [], False, None


def apply_carriage_returns(text: str) -> str:
    """Return what a terminal shows of `text`: a carriage return has its line overwritten.

    A carriage return at the end is kept: the text that overwrites the line may follow later.
    """
    if _UP in text:
        return "\n".join(_on_screen(text)[0])
    if "\r" not in text:
        return text
    lines = _LINE_END.sub("\n", text).split("\n")
    for number, line in enumerate(lines):
        if "\r" in line:
            shown, at = _overwrite(line)
            lines[number] = f"{shown}\r" if at == 0 and shown else shown
    return "\n".join(lines)


def resumable(text: str) -> str:
    """`text` shortened so that with any text after it, it still shows the same.

    Of a line that was overwritten many times, only what it shows is kept, and up to where the last
    piece has overwritten it.
    """
    if _UP in text:
        lines, row, column = _on_screen(text)
        up = _UP * (len(lines) - 1 - row)
        return "\n".join(lines) + f"{up}\r{lines[row][:column]}"
    if "\r" not in text:
        return text
    head, end, line = _LINE_END.sub("\n", text).rpartition("\n")
    head = apply_carriage_returns(head)
    if "\r" not in line:
        return f"{head}{end}{line}"
    shown, at = _overwrite(line)
    return f"{head}{end}{shown}\r{shown[:at]}"


def _on_screen(text: str) -> tuple[list[str], int, int]:
    """The lines that a terminal shows, and the line and column of its cursor."""
    lines, row, column = [""], 0, 0
    for piece in _MOVES.split(_LINE_END.sub("\n", text)):
        if piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        elif piece == _UP:
            row = max(0, row - 1)
        elif piece:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + piece + line[column + len(piece) :]
            column += len(piece)
    return lines, row, column


def bars_apart(items: Iterable[OutputItem]) -> list[OutputItem]:
    """`items` with progress bars separated from stderr: they are neither errors nor warnings."""
    apart: list[OutputItem] = []
    for item in items:
        if item.what is not OutputKind.STDERR or not _BAR.search(item.text):
            apart.append(item)
            continue
        pieces: list[OutputItem] = []
        for line in item.text.splitlines(keepends=True):
            what = OutputKind.STDOUT if _BAR.search(line) else item.what
            if pieces and pieces[-1].what is what:
                pieces[-1] = replace(pieces[-1], text=pieces[-1].text + line)
            elif line.strip():
                pieces.append(OutputItem(what, line))
        apart += pieces
    return apart


def _overwrite(line: str) -> tuple[str, int]:
    """Return the text that a line shows, and the column of the next character."""
    shown, piece = "", ""
    for piece in line.split("\r"):
        shown = piece + shown[len(piece) :]
    return shown, len(piece)


def group(logs: Mapping[int, Sequence[OutputItem]]) -> tuple[OutputGroup, ...]:
    """Equal output once, in the order of the first rank; ranks without output are left out.

    Display ids and memory addresses, which differ between ranks with the same output, are ignored.
    """
    groups: dict[str, tuple[list[int], tuple[OutputItem, ...]]] = {}
    for rank in sorted(logs):
        if items := tuple(logs[rank]):
            compared = []
            for item in items:
                data = {kind: _without_addresses(value) for kind, value in item.data.items()}
                compared.append((item.what, _without_addresses(item.text), data))
            groups.setdefault(repr(compared), ([], items))[0].append(rank)
    return tuple(OutputGroup(tuple(members), items) for members, items in groups.values())


def _without_addresses(value: object) -> object:
    # Longer text is compared unchanged.
    if not isinstance(value, str) or len(value) > 20_000 or "0x" not in value:
        return value
    return _ADDRESS.sub("0x", value)


def group_live(logs: Mapping[int, Sequence[OutputItem]]) -> tuple[OutputGroup, ...]:
    """Like `group` during a run: a rank whose output is only behind counts as equal.

    Two ranks are in one group if the output of one is the beginning of the other's; the longest is
    shown.
    """
    groups: list[tuple[list[int], Sequence[OutputItem]]] = []
    for rank in sorted(logs):
        items = logs[rank]
        if not items:
            continue
        for index, (members, shown) in enumerate(groups):
            if _begins(shown, items):
                groups[index] = ([*members, rank], items)
                break
            if _begins(items, shown):
                members.append(rank)
                break
        else:
            groups.append(([rank], items))
    return tuple(OutputGroup(tuple(sorted(ranks)), tuple(items)) for ranks, items in groups)


def _begins(shorter: Sequence[OutputItem], longer: Sequence[OutputItem]) -> bool:
    if len(shorter) > len(longer):
        return False
    for index, (a, b) in enumerate(zip(shorter, longer, strict=False)):
        last = index == len(shorter) - 1
        if a.what is not b.what:
            return False
        if a.what in STREAMS and last:
            if not b.text.startswith(a.text):
                return False
        elif (a.text, a.data) != (b.text, b.data):
            return False
    return True


def split_errors(
    groups: Iterable[OutputGroup],
) -> tuple[tuple[OutputGroup, ...], tuple[OutputGroup, ...]]:
    """Tracebacks first, each once with its ranks; then everything else.

    torch puts a rank's own number into some messages, gloo the port of its peer. Tracebacks that
    differ only in these are shown as one, with ``rank N`` and ``PORT`` in their place.
    """
    errors: dict[str, dict[str, list[int]]] = {}
    # Ranks whose output is equal without tracebacks are one group.
    rest: dict[str, tuple[list[int], tuple[OutputItem, ...]]] = {}
    for each in groups:
        others = []
        for item in each.items:
            if item.what is OutputKind.ERROR:
                same = errors.setdefault(of_any_rank(item.text, each.ranks), {})
                same.setdefault(item.text, []).extend(each.ranks)
            else:
                others.append(item)
        if others:
            rest.setdefault(repr(others), ([], tuple(others)))[0].extend(each.ranks)
    tracebacks = []
    for text, same in errors.items():
        shown = text if len(same) > 1 else next(iter(same))
        ranks = tuple(sorted(rank for members in same.values() for rank in members))
        tracebacks.append(OutputGroup(ranks, (OutputItem(OutputKind.ERROR, text=shown),)))
    merged = (OutputGroup(tuple(sorted(ranks)), items) for ranks, items in rest.values())
    return tuple(tracebacks), tuple(merged)


_PEERS_PORT = re.compile(r"(\bpeer \[[^\]\s]+\]):\d+")
"""In gloo's errors of a connection that was lost: each rank has another one."""


def of_any_rank(text: str, ranks: Ranks) -> str:
    """A rank's text without its own number, if no other rank has the same, and its peer's port."""
    text = _PEERS_PORT.sub(r"\1:PORT", text)
    return re.sub(rf"\b([Rr]ank) {ranks[0]}\b", r"\1 N", text) if len(ranks) == 1 else text
