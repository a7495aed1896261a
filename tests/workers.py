"""Which tests share a worker (pytest -n), and did they."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any


def together(test: str) -> str:
    """What the test shares a worker with: its file, with which it shares ranks.

    Those in a browser share the browser and the JupyterLab; each notebook has a kernel of its own.
    """
    file = test.split("::")[0]
    layer = Path(file).parent.name
    return {"browser": layer, "notebooks": test}.get(layer, file)


def scheduler(config: Any, log: Any) -> Any:
    """Hands out tests to the workers as `together` says."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

    return Scheduling(config, log)


def scattered(reporter: Any) -> list[str]:
    """What was to run on one worker and ran on several: its ranks were started several times."""
    workers: dict[str, set[str]] = defaultdict(set)
    if reporter.config.getoption("dist", "no") == "loadfile":
        for report in (r for kind in ("passed", "failed") for r in reporter.getreports(kind)):
            workers[together(report.nodeid)].add(report.node.gateway.id)
    return sorted(each for each, ran_on in workers.items() if len(ran_on) > 1)
