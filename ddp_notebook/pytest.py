"""A plugin for pytest: a test whose ranks hang fails within seconds, with the finding.

`pytest -p ddp_notebook.pytest`. Ranks that a test starts, by torchrun or as processes that load
torch anew, are prepared by the variable DDP_NOTEBOOK. While a test runs, they are looked at. Once
they wait for what cannot come, they are ended, and the test fails. One that fails otherwise gets
what is wrong with its ranks beside its own error, as where a lost connection is only the end of
it. A test that hangs on purpose is marked: `@pytest.mark.ddp_may_hang`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Before the variable is set: this process itself is no rank, and is not to be looked at.
from ddp_notebook import autoload as _autoload  # noqa: F401
from ddp_notebook.jobs import prepared, records
from ddp_notebook.jobs.records import Job
from ddp_notebook.jobs.verdict import Verdict
from ddp_notebook.launch.session_folder import remove
from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.views import findings

_MARK = "ddp_may_hang"
_LOOK_EVERY_S = 0.5
_LASTS_S = 1.5
"""For so long a finding must stand: what ends by itself meanwhile is the test's own affair."""
_MADE = pytest.StashKey[tuple[Path, os.stat_result]]()
_HUNG = pytest.StashKey[Verdict | None]()
_HAS_HUNG = "The ranks of this test hung, and were ended."
_OF_RANKS = "What was wrong with the ranks of this test"


class Watch:
    """Looks at the ranks that were started since, until it is stopped."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        """Why ranks were ended."""
        self._stopped = threading.Event()
        self._since: dict[object, float] = {}
        self._thread = threading.Thread(target=self._look, name="ddp-pytest", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(_LOOK_EVERY_S):
            for job in records.jobs():
                if job.alive:
                    self._judge(job)

    def _judge(self, job: Job) -> None:
        verdict = prepared.why(job)
        key = min(process.folder for process in job.processes.values())
        if not any(f.waiting and not f.passing and f.ranks for f in verdict.diagnosis.findings):
            self._since.pop(key, None)
            return
        now_s = time.monotonic()
        if now_s - self._since.setdefault(key, now_s) >= _LASTS_S:
            self.verdict = verdict
            alive = {job.processes[rank].about.pid for rank in job.alive}
            for pid in {*alive, *prepared.stopped_early(job).values()} - {os.getpid()}:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def pytest_configure(config: pytest.Config) -> None:
    """Have the ranks of tests prepare themselves, in a folder of this run's."""
    config.addinivalue_line("markers", f"{_MARK}: the ranks of this test may wait forever")
    # A socket's path is short, wherever temporary folders are.
    folder = Path(tempfile.mkdtemp(prefix="ddp-pytest-", dir=_parent()))
    config.stash[_MADE] = (folder, folder.stat())
    os.environ[job_folder.FOLDER_VARIABLE] = str(folder)
    os.environ["DDP_NOTEBOOK"] = "1"


def _parent() -> str:
    return "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()  # noqa: S108


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave nothing."""
    if _MADE in config.stash:  # not what the variable says now: a test may have changed it
        remove(*config.stash[_MADE])
    os.environ.pop(job_folder.FOLDER_VARIABLE, None)
    os.environ.pop("DDP_NOTEBOOK", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Watch the ranks of a test; where they hang, end them."""
    for process in job_folder.processes():
        if not process[0].alive:  # of a test before
            shutil.rmtree(process[1], ignore_errors=True)
    if item.get_closest_marker(_MARK) is not None:
        return (yield)
    watch = Watch()
    try:
        return (yield)
    finally:
        watch.stop()
        item.stash[_HUNG] = watch.verdict


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where the ranks of a test hung, that is how it failed; beside another failure, the finding.

    Not raised in the test's call: unittest's cases would report their own error in its place.
    """
    report = yield
    if call.when != "call":
        return report
    if (verdict := item.stash.get(_HUNG, None)) is not None:
        text = findings.text(verdict.diagnosis)
        with pytest.raises(pytest.fail.Exception) as failed:
            pytest.fail(f"{_HAS_HUNG}\n\n{text}", pytrace=False)
        report.outcome = "failed"
        report.longrepr = item.repr_failure(failed)
    elif report.failed:
        found = (prepared.why(job).diagnosis for job in records.jobs())
        texts = [findings.text(diagnosis) for diagnosis in found if diagnosis.wrong]
        report.sections += [(_OF_RANKS, text) for text in texts]
    return report
