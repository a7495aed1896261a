"""A plugin for pytest: a test whose ranks hang fails within seconds, with the finding.

`pytest -p ddp_notebook.pytest`. The variable DDP_NOTEBOOK prepares ranks that a test starts, by
torchrun or as processes that import torch themselves. They are looked at while the test runs. Once
they wait for something that cannot happen, they are ended, and the test fails. A test that fails
otherwise shows the finding about its ranks beside its own error, as a lost connection is often only
the end of the story. A test that hangs on purpose is marked: `@pytest.mark.ddp_may_hang`.
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
_MADE = pytest.StashKey[tuple[Path, os.stat_result]]()
_HUNG = pytest.StashKey[Verdict | None]()
_HAS_HUNG = "The ranks of this test hung, and were ended."
_OF_RANKS = "Problems of the ranks of this test"
_EXPLAIN = "ddp-notebook explain {}"


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
        """Stop looking."""
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(0.5):
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
        # A finding must hold for 1.5 s: a wait that ends by itself is the test's own affair.
        if now_s - self._since.setdefault(key, now_s) >= 1.5:
            self.verdict = verdict
            for pid in {job.processes[rank].about.pid for rank in job.alive} - {os.getpid()}:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def pytest_configure(config: pytest.Config) -> None:
    """Have the ranks of tests prepare themselves, in a folder of this run's."""
    config.addinivalue_line("markers", f"{_MARK}: the ranks of this test may wait forever")
    # A socket's path is short, wherever temporary folders are.
    parent = "/tmp" if Path("/tmp").is_dir() else tempfile.gettempdir()  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="ddp-pytest-", dir=parent))
    config.stash[_MADE] = (folder, folder.stat())
    os.environ[job_folder.FOLDER_VARIABLE] = str(folder)
    os.environ["DDP_NOTEBOOK"] = "1"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave nothing."""
    if _MADE in config.stash:  # not what the variable says now: a test may have changed it
        remove(*config.stash[_MADE])
    os.environ.pop(job_folder.FOLDER_VARIABLE, None)
    os.environ.pop("DDP_NOTEBOOK", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Watch the ranks of a test; where they hang, end them."""
    # A rank that was left by the test before must not be taken for one of this test.
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
        text = findings.text(verdict.diagnosis, _EXPLAIN)
        with pytest.raises(pytest.fail.Exception) as failed:
            pytest.fail(f"{_HAS_HUNG}\n\n{text}", pytrace=False)
        report.outcome = "failed"
        report.longrepr = item.repr_failure(failed)
    elif report.failed:
        found = (prepared.why(job).diagnosis for job in records.jobs())
        texts = [findings.text(diagnosis, _EXPLAIN) for diagnosis in found if diagnosis.wrong]
        report.sections += [(_OF_RANKS, text) for text in texts]
    return report
