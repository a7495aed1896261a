"""What an open board costs a training step: the same loop while it is drawn and while it is not."""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from observing import Ranks
from rows import Measurement, Numbers, Row, seconds

from ddp_notebook.board.controller import LiveBoard

_TURNS, _TURN_S = 40, 3.0
STEPS = """
import time
torch.manual_seed(0)
torch.set_num_threads(1)
model = DDP(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8))))
batch, ends_ns = torch.ones(64, 256), []
until_s = time.monotonic() + {for_s}
on = torch.ones(1)
while on.item():
    model(batch).sum().backward()
    ends_ns.append(time.monotonic_ns())
    if not len(ends_ns) % 50:
        on[0] = float(time.monotonic() < until_s)
        dist.broadcast(on, 0)
"""


class _Gated(LiveBoard):
    """A board that is drawn, and samples what ranks use, in every other turn."""

    began_s = drawn_s = 0.0

    def _draw(self, *, closing: bool = False) -> None:
        if closing or int((time.monotonic() - self.began_s) / _TURN_S) % 2:
            began_s = time.thread_time()
            super()._draw(closing=closing)
            self.drawn_s += time.thread_time() - began_s


class Watched(Measurement):
    """Steps of two ranks in turns of some seconds, with the board and without; medians of each.

    What is told is the median of the ratios of neighbouring turns, and in brackets where it lies
    with 95 %. The page itself is not measured: it may run on another machine.
    """

    name = "watched"

    def round(self) -> Numbers:
        """One session of two ranks."""
        for_s = _TURNS * _TURN_S
        nothing: Any = lambda *_, **__: None  # noqa: E731
        shell = SimpleNamespace(display_pub=SimpleNamespace(publish=nothing))
        with Ranks(2) as session:
            board = _Gated(session, shell, {})
            board.began_s = time.monotonic()
            board.open(0.0, nothing)
            cell = threading.Thread(
                target=lambda: session.run_cell(STEPS.format(for_s=for_s)).raise_for_error()
            )
            cell.start()
            cell.join()
            board.close()
            ends_ns = session.pull("ends_ns")[0]
        turns: list[list[int]] = [[] for _ in range(_TURNS)]
        for begin, end in pairwise(ends_ns):
            turn = int((end / 1e9 - board.began_s) / _TURN_S)
            if 0 < turn < _TURNS - 1:
                turns[turn].append(end - begin)
        steps_ns = [statistics.median(turn) for turn in turns[1:-1] if turn]
        ratios = sorted(
            one / other if n % 2 == 0 else other / one
            for n, (one, other) in enumerate(pairwise(steps_ns))
        )
        off = int(0.98 * len(ratios) ** 0.5) + 1
        middle = len(ratios) // 2
        return {
            "step_s": statistics.median(steps_ns) / 1e9,
            "ratio": statistics.median(ratios),
            "low": ratios[middle - off],
            "high": ratios[middle + off],
            "drawing": board.drawn_s / (for_s / 2),
        }

    def rows(self, medians: Numbers) -> list[Row]:
        """Against the bar."""
        ratio, low, high = (medians[name] for name in ("ratio", "low", "high"))
        ours = f"{seconds(medians['step_s'])} [{low:.3f}x, {high:.3f}x]"
        return [
            Row(
                "a training step, board open",
                ours,
                "no board",
                ratio,
                "at most 1.01x",
                ratio <= 1.01,
            ),
            Row("an open board, of a core", f"{medians['drawing']:.1%}"),
        ]
