"""Fills the tabs of the pages that watch one: asks the ranks when something has changed.

Nothing is asked for a tab that no page has open, and nothing while a benchmark runs: what is asked
would be measured too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ddp_notebook.board import tab_contents
from ddp_notebook.errors import DDPError

if TYPE_CHECKING:
    from ddp_notebook.session import Session

TABS = ("stack", "source", "variables", "console", "history")
_ASKING = ("stack", "variables")
"""The tabs for which the ranks are asked."""
_BESIDE = {"source": _ASKING}
"""What a tab shows besides its own content."""
_SETTLED_S = 0.25
"""Ranks are asked when nothing has changed for so long: those that train on are left alone."""
_WRITTEN_S = 0.5
"""Between two looks at what ranks wrote."""


class TabFeed:
    """The tabs that pages watch, and what was sent of them. `tell` sends values to all pages."""

    def __init__(self, session: Session, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._session = session
        self._tell = tell
        self._lock = threading.Lock()
        self._watching: dict[str, tuple[str, float]] = {}
        """The open tab of each page, and when the page last sent a message."""
        self._told: dict[str, object] = {}
        """A key of what was last sent for each tab."""
        self._asked: set[str] = set()
        """Tabs for which the ranks are being asked."""
        self._key: object = None
        self._changed_s = 0.0
        self._looked_s = 0.0

    def message(self, content: Mapping[str, Any], view: str) -> None:
        """A page sent a message (any thread): it is there, and may have another tab open now."""
        tab, known = content.get("tab"), self._watching.get(view, ("", 0.0))[0]
        with self._lock:
            if content.get("kind") == "watch":
                self._watching.pop(view, None)
                known = tab if tab in TABS else ""
                for each in (known, *_BESIDE.get(known, ())):
                    self._told.pop(each, None)
            if known:
                self._watching[view] = (known, time.monotonic())
            while len(self._watching) > 16:
                del self._watching[next(iter(self._watching))]

    def turn(self, key: object) -> None:
        """Tell what is new. `key` is another one when a board would show something else."""
        now_s = time.monotonic()
        key = (key, self._session.findings.begun)
        if key != self._key:
            self._key, self._changed_s = key, now_s
        wanted = self._wanted(now_s)
        if "history" in wanted:
            self._show_history()
        if "console" in wanted and now_s - self._looked_s > _WRITTEN_S:
            self._looked_s = now_s
            self._show_console()
        settled = now_s - self._changed_s > _SETTLED_S or self._all_stand
        settled = settled and self._session.benchmarks.current is None
        for tab in wanted.intersection(_ASKING) - self._asked:
            if settled or tab not in self._told:
                self._ask_once(tab, key)

    def _wanted(self, now_s: float) -> set[str]:
        """The tabs that pages have open."""
        with self._lock:
            open_tabs = self._watching.values()
            # A page reports every minute; one that is silent for three was closed.
            tabs = {tab for tab, at_s in open_tabs if now_s - at_s < 180.0}
        beside = (each for tab in tabs for each in _BESIDE.get(tab, ()))
        return tabs.union(beside) if self._session.runs.stops else tabs

    @property
    def _all_stand(self) -> bool:
        """Every rank that is in the run is paused at a line: nothing changes by itself."""
        run = self._session.runs.current
        return run is not None and bool(run.stops) and run.stops.keys() >= set(run.pending)

    def _ask_once(self, tab: str, key: object) -> None:
        if self._told.get(tab) == key:
            return
        self._asked.add(tab)
        self._told[tab] = key
        threading.Thread(target=self._ask, args=(tab,), name="ddp-tab", daemon=True).start()

    def _ask(self, tab: str) -> None:
        """Ask the ranks, and tell what they answer; why not, where they cannot be asked."""
        try:
            content = self._stack() if tab == "stack" else self._variables()
        except DDPError as error:
            content = {"error": str(error)}
        finally:
            self._asked.discard(tab)
        run = self._session.runs.current
        about = {"at": time.strftime("%H:%M:%S"), "of": run.title if run is not None else ""}
        self._tell({tab: {**content, **about}})

    def _stack(self) -> dict[str, Any]:
        run = self._session.runs.current
        sources = run.sources if run is not None else {}
        return tab_contents.stack_json(self._session.where(), sources)

    def _variables(self) -> dict[str, Any]:
        return tab_contents.variables_json(self._session.variables())

    def _show_history(self) -> None:
        runs = self._session.runs.past.runs
        key = tuple(map(tab_contents.without_age, runs))
        if self._told.get("history") != key:
            self._told["history"] = key
            self._tell({"history": tab_contents.history_json(runs)})

    def _show_console(self) -> None:
        run = self._session.runs.current
        key = (
            (run.cell, run.events.changes, tuple(run.events.withheld)) if run is not None else None
        )
        if self._told.get("console", self) == key:
            return
        self._told["console"] = key
        groups = run.events.live_groups() if run is not None else ()
        title = run.title if run is not None else ""
        withheld = dict(run.events.withheld) if run is not None else {}
        self._tell({"console": tab_contents.console_json(title, groups, withheld)})
