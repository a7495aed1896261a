"""What every test runs under: its own temporary folder, and proof that nothing is left behind."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import subprocess
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import lazy
import pytest
import support
import workers
from support import (
    GONE_WITHIN_S,
    Leftovers,
    clear_away,
    eventually,
    ipython_shell,
    leftovers,
)

from ddp_notebook.rank.prepared import job_folder
from ddp_notebook.session import InitOptions, Session

# Before anything starts a process: children inherit both. The folder's name is short,
# because the path of a socket must be.
os.environ[support.RUN_TAG] = uuid.uuid4().hex
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process compiles the package again
_RUN_FOLDER = Path(tempfile.mkdtemp(prefix="dt-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]))
# The same file in all workers of a run (pytest -n): they inherit its name.
_TURNS = os.environ.setdefault("DDP_NOTEBOOK_TEST_TURNS", str(_RUN_FOLDER / "turns"))
os.environ["TMPDIR"] = tempfile.tempdir = str(_RUN_FOLDER)
os.environ["IPYTHONDIR"] = str(_RUN_FOLDER / "ipython")
os.environ["JUPYTER_RUNTIME_DIR"] = str(_RUN_FOLDER / "runtime")


LAYERS = ("browser", "notebooks", "contract", "magics", "unit")
"""In the order in which they run: files that take long come first."""
LAYERS_WITH_SESSIONS = {"contract", "magics"}
MOST_FLAKY = 3
"""So many tests of a run may fail once and pass when they are run again (``--reruns 1``)."""
_FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Have the workers of a run (pytest -n) begin the files in the order in which they come."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes first, or the other workers would wait for one at the end.

    Files with tests that want no other beside them come when the others are short: until then
    their worker waits.
    """
    for item in items if support.LAZY else ():
        for why in (why for name, why in lazy.NOT_SO.items() if name in item.nodeid):
            item.add_marker(pytest.mark.skip(reason=why))
    alone = {item.path for item in items if item.get_closest_marker("alone")}

    def turn(item: pytest.Item) -> int:
        if item.path in alone:
            return len(LAYERS) - 1
        layer = next((n for n, name in enumerate(LAYERS) if name in item.path.parts), 0)
        return layer + (layer == len(LAYERS) - 1)

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """What was collected stays: looking through it again and again for garbage costs minutes."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out tests to the workers as `workers.together` says."""
    return workers.scheduler(config, log) if config.getoption("dist") == "loadfile" else None


def _flaky(reporter: Any) -> dict[str, str]:
    """The tests that failed and passed when they were run again; how they failed, in a line."""
    failed = {report.nodeid for kind in ("failed", "error") for report in reporter.getreports(kind)}
    again = {report.nodeid: report for report in reporter.getreports("rerun")}
    return {test: _why(again[test].longrepr) for test in sorted(again.keys() - failed)}


def _why(failure: Any) -> str:
    crash = getattr(failure, "reprcrash", None)
    return f"{crash.path}:{crash.lineno}: {crash.message[:1000]}" if crash else str(failure)[-1000:]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which tests were flaky, and what a test of each layer costs."""
    for test, why in (flaky := _flaky(terminalreporter)).items():
        terminalreporter.write_line(
            f"FLAKY {test}: failed, and passed when it was run again: {why}"
        )
    if len(flaky) > MOST_FLAKY:
        line = f"{len(flaky)} flaky tests, and at most {MOST_FLAKY} are let pass"
        terminalreporter.write_line(line, red=True)
    if scattered := workers.scattered(terminalreporter):
        terminalreporter.write_line(f"on several workers: {', '.join(scattered)}", red=True)
    cost_s: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        if isinstance(report, pytest.TestReport):
            layer = report.nodeid.split("/")[1] if "/" in report.nodeid else report.nodeid
            cost_s[layer] += report.duration
            tests[layer].add(report.nodeid)
    for layer, seconds in sorted(cost_s.items(), key=lambda cost: -cost[1]):
        count = len(tests[layer])
        terminalreporter.write_line(
            f"{layer:<12} {count:>5} tests {seconds:>7.0f} s {seconds / count:>8.2f} s a test"
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run with many flaky tests, or scattered ones; take away the folder of this run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and (len(_flaky(reporter)) > MOST_FLAKY or workers.scattered(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if not getattr(session.config.option, "numprocesses", None):
        clear_away(Leftovers())  # those that only hand out tests have none but their workers
    shutil.rmtree(_RUN_FOLDER, ignore_errors=True)


def _check(before: Leftovers) -> None:
    left = Leftovers()

    def nothing() -> bool:
        nonlocal left
        left = leftovers().beyond(before)
        return not left

    try:
        eventually(nothing, GONE_WITHIN_S)
    except AssertionError:
        clear_away(left)
        pytest.fail(f"left behind after {GONE_WITHIN_S:g} s:\n{left}", pytrace=False)


@pytest.fixture(scope="session")
def warm_fork_server() -> Iterator[None]:
    """Sessions of this process start warm; see `support.warm_fork_server`."""
    with support.warm_fork_server():
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind_by_the_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's shared sessions leave nothing when the module is over."""
    if LAYERS_WITH_SESSIONS.intersection(request.path.parts):
        request.getfixturevalue("warm_fork_server")
    before = leftovers()
    yield
    _check(before)


@pytest.fixture(autouse=True)
def nothing_left_behind(nothing_left_behind_by_the_module: None) -> Iterator[None]:
    """No process, session folder, socket, shared memory or thread outlives a test.

    Except those of a session that the module shares (`ranks2`, `ranks4`, `support.spared`).
    """
    before = leftovers()
    yield
    _check(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note on the test that it failed, for the fixture below."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def shared_ranks_are_renewed_after_a_failure(
    request: pytest.FixtureRequest, nothing_left_behind: None
) -> Iterator[None]:
    """One test that fails does not fail those after it, nor its own second try."""
    request.node.stash[_FAILED] = False
    yield
    if request.node.stash[_FAILED]:
        support.renew_shared_ranks()


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test marked `alone` measures something: no other test of this run goes on meanwhile.

    It holds the entrance while it waits for those that go on, or others would always be first.
    """
    alone = request.node.get_closest_marker("alone") is not None
    with Path(_TURNS).open("a") as file:
        with Path(f"{_TURNS}-entrance").open("a") as entrance:
            fcntl.flock(entrance, fcntl.LOCK_EX)
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session of this test loads torch itself, as that of a notebook does."""
    monkeypatch.setenv("DDP_NOTEBOOK_TEST_COLD", uuid.uuid4().hex)


@pytest.fixture
def no_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder of this test was removed."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()


@pytest.fixture
def shell() -> Iterator[Any]:
    """A fresh real IPython shell with the extension loaded; its ranks end with the test."""
    with ipython_shell() as ipython:
        yield ipython


@pytest.fixture
def session() -> Iterator[Session]:
    """A session of this test alone, without ranks yet; it ends with the test."""
    made = Session()
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def shell2(nothing_left_behind_by_the_module: None) -> Iterator[Any]:
    """A shell with two ranks, shared by the tests of a module."""
    with support.shared_shell(2) as ipython:
        yield ipython


@pytest.fixture(scope="module")
def ranks2(nothing_left_behind_by_the_module: None) -> Iterator[Any]:
    """A session with two gloo ranks, shared by the tests of a module."""
    yield from _shared_session(2)


@pytest.fixture(scope="module")
def ranks3(nothing_left_behind_by_the_module: None) -> Iterator[Any]:
    """A session with three gloo ranks, shared by the tests of a module."""
    yield from _shared_session(3)


@pytest.fixture(scope="module")
def ranks4(nothing_left_behind_by_the_module: None) -> Iterator[Any]:
    """A session with four gloo ranks, shared by the tests of a module."""
    yield from _shared_session(4)


@pytest.fixture
def ranks(ranks3: Session) -> Iterator[Session]:
    """Three ranks, free before and after; other files have `ranks` of their own."""
    yield ranks3
    if not ranks3.record.snapshot.ready:
        ranks3.abort()


def _shared_session(world_size: int) -> Iterator[Any]:
    with support.shared_session(InitOptions(world_size=world_size, device="cpu")) as session:
        yield session


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen]]:
    """Ranks of `prepared_ranks` that a test started; they are ended after it."""
    # A socket's path is short.
    folder = f"/tmp/ddpnb-test-{os.getpid()}"
    monkeypatch.setenv(job_folder.FOLDER_VARIABLE, folder)
    ranks: list[subprocess.Popen] = []
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()
    shutil.rmtree(folder, ignore_errors=True)
