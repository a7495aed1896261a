"""A region of a cell's output that is drawn again when something changes.

It is drawn by a thread of its own, so that it changes while a cell blocks the kernel, and after the
cell has ended. Nothing is sent if nothing has changed.
"""

from __future__ import annotations

import contextvars
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Render = Callable[[], Mapping[str, str]]
"""Makes the MIME bundle to show now."""

BOARD_INTERVAL_S = 0.1
"""A board is drawn at most ten times a second, whatever the number of ranks."""
OUTPUT_INTERVAL_S = 0.008
"""Output may be drawn more often: what a rank prints should be seen at once."""
OUTPUT_SETTLE_S = 0.001
"""Ranks print at about the same time: after this delay one drawing shows what all of them wrote."""


class LiveRegion:
    """One region, alive from `open` to `close`.

    `render` is called on the drawing thread. Two drawings are at least `interval_s` apart, and at
    least twice the time that one takes; large ones a tenth of a second. A change is drawn
    `settle_s` after it was noticed, together with what has changed meanwhile.
    """

    def __init__(
        self,
        publisher: Any,
        render: Render,
        interval_s: float,
        settle_s: float = 0.0,
        over: Callable[[], bool] = lambda: False,
        context: contextvars.Context | None = None,
    ) -> None:
        """`over` is called before each drawing: once it returns true, that drawing is the last.

        A kernel sends messages for the cell of the `context`: by default the present one.
        """
        self._publisher = publisher
        self._over = over
        # ipykernel finds the cell that a message belongs to in a context variable, and a new thread
        # has none.
        self._context = context or contextvars.copy_context()
        self._render = render
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._display_id = uuid.uuid4().hex
        self._shown: Mapping[str, str] | None = None
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def shown(self) -> bool:
        """True once something is in the notebook."""
        return self._shown is not None

    @property
    def closed(self) -> bool:
        """True once it is not drawn any more."""
        return self._closed

    def open(self, delay_s: float = 0.0) -> None:
        """Start drawing, after `delay_s`, on a thread of its own."""
        context, loop = self._context, self._draw_loop
        threading.Thread(
            target=context.run, args=(loop, delay_s), name="ddp-drawing", daemon=True
        ).start()

    def nudge(self) -> None:
        """Something may have changed (any thread; quick)."""
        self._wake.set()

    def close(self, final: Mapping[str, str] | None = None) -> None:
        """Stop drawing; replace the region by `final` if anything was shown."""
        self._closed = True
        self._wake.set()
        with self._lock:
            if final is not None and self._shown is not None:
                self._publish(final)
            self._shown = self._shown and {}  # whoever keeps the region keeps no text

    def draw(self) -> None:
        """Draw the present state, if it differs from what is shown."""
        # `close` may come from another thread at any time: what is drawn after the final state
        # would stay.
        with self._lock:
            if self._closed:
                return
            if self._over():
                self._closed = True
            bundle = self._render()
            if bundle != self._shown:
                self._publish(bundle)

    def give_up_place(self, bundle: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
        """Replace the region by `bundle` and continue the region below it; for `render` to call.

        Returns a function that replaces `bundle` by another one.
        """
        # A front end can update a display, and not insert one above it.
        place = self._display_id
        self._send(place, bundle, update=self._shown is not None)
        self._display_id, self._shown = uuid.uuid4().hex, None
        return partial(self._send, place)

    def _publish(self, bundle: Mapping[str, str]) -> None:
        self._send(self._display_id, bundle, update=self._shown is not None)
        self._shown = bundle

    def _send(self, place: str, bundle: Mapping[str, Any], *, update: bool = True) -> None:
        self._publisher.publish(
            data=dict(bundle), metadata={}, transient={"display_id": place}, update=update
        )

    def _draw_loop(self, delay_s: float) -> None:
        # Most cells are over before the delay is, and are never drawn by this thread.
        if delay_s:
            time.sleep(delay_s)
        while not self._closed:
            started = time.monotonic()
            self._wake.clear()
            self.draw()
            # Drawing takes time from the ranks on a machine with few cores: at most a third of a
            # core.
            cost_s = time.monotonic() - started
            # A quiet region is looked at once a second: silence is news too.
            rest_s = max(self._interval_s - self._settle_s, 2 * cost_s)
            if sum(map(len, (self._shown or {}).values())) > 20_000:
                # Browsers draw large regions slowly, and no one reads ten screens a second.
                rest_s = max(rest_s, 0.1)
            if not self._closed:
                time.sleep(rest_s)
            if not self._closed and self._wake.wait(1.0) and self._settle_s:
                time.sleep(self._settle_s)
