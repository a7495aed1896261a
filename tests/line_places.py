"""Where a breakpoint is hit: each kind of place in a user's code, in a cell, a module and a script.

`python tests/line_places.py ROUNDS [NAME]` plays each so often, by each way in turn, and prints how
often it was hit with the right variables. `tests/contract/test_line_places.py` plays each once.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from support import shared_session

from ddp_notebook.errors import DDPError
from ddp_notebook.rank.calls import Breakpoint
from ddp_notebook.session import InitOptions, Session
from ddp_notebook.session.runs.endings import CellResult

WITHIN_S = 60.0
RANKS = 2
_modules = itertools.count(1)
HERE = "# HERE"
WAYS = ("breakpoint()", "file:line", "function")
HOLDERS = ("cell", "package", "script")
BEGIN = """\
import asyncio, gc, threading, torch
import torch.distributed as dist
"""


@dataclass(frozen=True)
class Place:
    """Code whose line `HERE` is stopped at once in `use()`, where `mark` is 7 + the rank.

    `function`: what `%ddp_break` calls the function whose first line that is, empty where it has
    no name. `said`: that line where it says `breakpoint()` itself, being no statement. `since`: the
    Python from which on a breakpoint is hit there; before, `breakpoint()` alone.
    """

    name: str
    source: str
    function: str = ""
    mark: str = "mark"
    said: str = ""
    since: tuple[int, int] = (3, 11)

    @property
    def ways(self) -> tuple[str, ...]:
        """How it can be stopped at on this Python."""
        ways = WAYS if self.function else WAYS[:2]
        return ways if sys.version_info >= self.since else WAYS[:1]

    @property
    def text(self) -> str:
        """The whole source."""
        return BEGIN + textwrap.dedent(self.source).lstrip("\n")


PLACES = (
    Place(
        "function",
        """
        def plain(mark):
            seen = mark  # HERE
            return seen

        def use():
            plain(7 + dist.get_rank())
        """,
        "plain",
    ),
    Place(
        "top level",
        """
        mark = 7 + int(__import__("os").environ["RANK"])
        seen = mark  # HERE

        def use():
            pass
        """,
    ),
    Place(
        "generator",
        """
        def numbers(mark):
            yield mark  # HERE
            yield mark + 1

        def use():
            assert len(list(numbers(7 + dist.get_rank()))) == 2
        """,
        "numbers",
    ),
    Place(
        "coroutine",
        """
        async def inner(mark):
            await asyncio.sleep(0)  # HERE
            return mark

        async def outer(mark):
            return await asyncio.gather(inner(mark))

        def use():
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=lambda: loop.run_until_complete(outer(7 + rank_of())))
            thread.start()
            thread.join()
            loop.close()

        def rank_of():
            return dist.get_rank()
        """,
        "inner",
    ),
    Place(
        "async generator",
        """
        async def ticks(mark):
            yield mark  # HERE

        async def outer(mark):
            return [each async for each in ticks(mark)]

        def use():
            coroutine = outer(7 + dist.get_rank())
            try:
                coroutine.send(None)
            except StopIteration:
                pass
        """,
        "ticks",
    ),
    Place(
        "decorator",
        """
        import functools

        def decorate(function):
            @functools.wraps(function)
            def wrapper(mark):
                made = function(mark)  # HERE
                return made
            return wrapper

        @decorate
        def decorated(mark):
            return mark

        def use():
            decorated(7 + dist.get_rank())
        """,
        "decorate.wrapper",
    ),
    Place(
        "decorated function",
        """
        import functools

        def decorate(function):
            @functools.wraps(function)
            def wrapper(*args):
                return function(*args)
            return wrapper

        @decorate
        @torch.no_grad()
        def decorated(mark):
            seen = mark  # HERE
            return seen

        def use():
            decorated(7 + dist.get_rank())
        """,
        "decorated",
    ),
    Place(
        "lambda",
        """
        square = lambda mark: (
            mark * mark  # HERE
        )

        def use():
            square(7 + dist.get_rank())
        """,
        "square",
        said="    (breakpoint(), mark * mark)[1]  # HERE",
    ),
    Place(
        "class body",
        """
        def use():
            class Made:
                mark = 7 + dist.get_rank()
                seen = mark  # HERE
            return Made
        """,
    ),
    Place(
        "property",
        """
        class Held:
            def __init__(self, mark):
                self.mark = mark

            @property
            def twice(self):
                return self.mark * 2  # HERE

        def use():
            Held(7 + dist.get_rank()).twice
        """,
        "Held.twice",
        mark="self.mark",
    ),
    Place(
        "__del__",
        """
        class Gone:
            def __init__(self, mark):
                self.mark = mark

            def __del__(self):
                seen = self.mark  # HERE

        def use():
            gone = Gone(7 + dist.get_rank())
            del gone
            gc.collect()
        """,
        "Gone.__del__",
        mark="self.mark",
    ),
    Place(
        "closure",
        """
        def make(mark):
            def inner():
                seen = mark  # HERE
                return seen
            return inner

        def use():
            make(7 + dist.get_rank())()
        """,
        "make.inner",
    ),
    Place(
        "comm hook",
        """
        def hook(mark, bucket):
            future = torch.futures.Future()  # HERE
            future.set_result(bucket.buffer())
            return future

        def use():
            net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            net.register_comm_hook(7 + dist.get_rank(), hook)
            net(torch.ones(1, 2)).sum().backward()
        """,
        "hook",
    ),
    Place(
        "comm hook in gloo's thread",
        """
        def hook(mark, bucket):
            def reduced(future):
                seen = mark  # HERE
                return future.value()[0]
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(reduced)

        def use():
            net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            net.register_comm_hook(7 + dist.get_rank(), hook)
            net(torch.ones(1, 2)).sum().backward()
        """,
        "hook.reduced",
        since=(3, 12),
    ),
    Place(
        "tensor hook",
        """
        def scale(grad, mark=0):
            mark = mark or 7 + dist.get_rank()
            return grad * 2  # HERE

        def use():
            weight = torch.ones(2, requires_grad=True)
            weight.register_hook(scale)
            weight.sum().backward()
        """,
    ),
    Place(
        "post-accumulate hook",
        """
        import functools

        def accumulated(mark, parameter):
            parameter.grad = None  # HERE

        def use():
            weight = torch.ones(2, requires_grad=True)
            hook = functools.partial(accumulated, 7 + dist.get_rank())
            weight.register_post_accumulate_grad_hook(hook)
            weight.sum().backward()
        """,
        "accumulated",
    ),
    Place(
        "module forward",
        """
        class Net(torch.nn.Module):
            def forward(self, mark):
                seen = mark  # HERE
                return torch.ones(1, requires_grad=True) * seen

        def use():
            Net()(7 + dist.get_rank())
        """,
        "Net",
    ),
    Place(
        "forward of a DDP model",
        """
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(1))

            def forward(self, mark):
                seen = mark  # HERE
                return self.weight * seen

        def use():
            global net
            net = torch.nn.parallel.DistributedDataParallel(Net())
            net(7 + dist.get_rank()).backward()
        """,
        "net.module",
    ),
    Place(
        "what partial is around",
        """
        import functools

        def added(mark, x):
            return mark + x  # HERE

        def use():
            global more
            more = functools.partial(added, 7 + dist.get_rank())
            more(1)
        """,
        "more",
    ),
    Place(
        "autograd function",
        """
        class Own(torch.autograd.Function):
            @staticmethod
            def forward(context, x, mark):
                context.mark = mark
                return x * 2

            @staticmethod
            def backward(context, grad):
                mark = context.mark
                return grad * 2, None  # HERE

        def use():
            Own.apply(torch.ones(1, requires_grad=True), 7 + dist.get_rank()).backward()
        """,
    ),
    Place(
        "caller of what is compiled",
        """
        @torch.compile(backend="eager")
        def compiled(x):
            return x * 2

        def caller(mark):
            x = torch.ones(2)  # HERE
            return compiled(x)

        def use():
            caller(7 + dist.get_rank())
        """,
        "caller",
    ),
    Place(
        "compiled function",
        """
        @torch.compile(backend="eager")
        def compiled(mark, x):
            y = x * 2  # HERE
            return y + mark

        def use():
            compiled(7 + dist.get_rank(), torch.ones(2))
        """,
        "compiled",
    ),
    Place(
        "called by what is compiled",
        """
        def inner(mark, x):
            y = x * 2  # HERE
            return y + mark

        @torch.compile(backend="eager")
        def compiled(mark, x):
            return inner(mark, x) + 1

        def use():
            compiled(7 + dist.get_rank(), torch.ones(2))
        """,
        "inner",
    ),
    Place(
        "DataLoader's collate",
        """
        def collate(batch):
            mark = batch[0] + dist.get_rank()
            return torch.tensor(batch)  # HERE

        def use():
            for batch in torch.utils.data.DataLoader([7, 8], batch_size=2, collate_fn=collate):
                pass
        """,
    ),
    Place(
        "a thread of the user's",
        """
        def work(mark):
            seen = mark  # HERE
            return seen

        def use():
            thread = threading.Thread(target=work, args=(7 + dist.get_rank(),), name="mine")
            thread.start()
            thread.join()
        """,
        "work",
    ),
    Place(
        "a pool of threads",
        """
        from concurrent.futures import ThreadPoolExecutor

        def work(mark):
            seen = mark  # HERE
            return seen

        def use():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work, 7 + dist.get_rank()).result()
        """,
        "work",
    ),
    Place(
        "except and finally",
        """
        def failing(mark):
            try:
                raise ValueError
            except ValueError:
                seen = mark  # HERE
            finally:
                del mark

        def use():
            failing(7 + dist.get_rank())
        """,
    ),
    Place(
        "match",
        """
        def chosen(mark):
            match mark:
                case int():
                    seen = mark  # HERE
            return seen

        def use():
            chosen(7 + dist.get_rank())
        """,
    ),
    Place(
        "in a signal handler",
        """
        import os, signal

        def handler(number, frame):
            mark = 7 + dist.get_rank()
            seen = mark  # HERE

        def use():
            before = signal.signal(signal.SIGUSR2, handler)
            os.kill(os.getpid(), signal.SIGUSR2)
            signal.signal(signal.SIGUSR2, before)
        """,
    ),
)


def play(session: Session, place: Place, way: str, holder: str, folder: Path) -> None:
    """Have the ranks come by the line. Raises AssertionError where it is not hit as it should."""
    text = _saying(place) if way == "breakpoint()" else place.text
    line = 1 + [HERE in each for each in text.splitlines()].index(True)
    if holder == "cell":
        ran = _as_cell(session, place, way, text, line)
        line += 1  # the magic's own
    elif holder == "package":
        ran = _as_package(session, place, way, text, line, folder)
    else:
        ran = _as_script(session, way, text, line, folder)
    try:
        _check(session, place, ran, line)
    finally:
        session.breakpoints.clear()
        if any(not run.done for run in session.runs.all):
            session.abort()


def _saying(place: Place) -> str:
    """With `breakpoint()` in the line before, or in it."""
    made = []
    for line in place.text.splitlines():
        before = line[: len(line) - len(line.lstrip())]
        if HERE in line and not place.said:
            made += [f"{before}breakpoint()  {HERE}", line.replace(HERE, "")]
        else:
            made.append(place.said if HERE in line else line)
    return "\n".join(made) + "\n"


def _at(way: str, place: str, function: str) -> str:
    return place if way == "file:line" else function


def _as_cell(session: Session, place: Place, way: str, text: str, line: int) -> CellResult:
    ran = session.run_cell(text)
    if ran.steps is not None:
        return ran
    if way != "breakpoint()":
        number = session.runs.all[-1].number
        if way == "function":
            session.run_cell("use()").raise_for_error()  # it has run before
        session.breakpoints.add(
            _at(way, f"cell {number}:{line + 1}", place.function), Breakpoint(0)
        )
    return session.run_cell("use()" if place.name != "top level" else text)


def _as_package(
    session: Session, place: Place, way: str, text: str, line: int, folder: Path
) -> CellResult:
    module = f"places_{next(_modules)}"
    path = folder / module / "inner.py"
    path.parent.mkdir()
    path.write_text(text)
    (path.parent / "__init__.py").write_text("from .inner import use\n")
    begin = f"import sys\nsys.path.insert(0, {str(folder)!r})\nimport {module}\n"
    if way == "file:line":
        session.breakpoints.add(f"{path}:{line}", Breakpoint(0))
    elif way == "function":
        session.run_cell(f"{begin}{module}.use()\n").raise_for_error()
        session.breakpoints.add(f"{module}.inner.{place.function}", Breakpoint(0))
    return session.run_cell(f"{begin}{module}.use()\n")


def _as_script(session: Session, way: str, text: str, line: int, folder: Path) -> CellResult:
    path = folder / f"script_{next(_modules)}.py"
    path.write_text(
        f"{text}\ndist.init_process_group('gloo')\nuse()\ndist.barrier()\ndist.destroy_process_group()\n"
    )
    if way == "file:line":
        session.breakpoints.add(f"{path}:{line}", Breakpoint(0))
    return session.run_script(str(path))


def _check(session: Session, place: Place, ran: CellResult, line: int) -> None:
    stops = session.runs.all[-1].stops
    where = {rank: stop.line for rank, stop in stops.items()}
    assert where == dict.fromkeys(range(RANKS), line), (
        f"stopped at {where}, not {line}: {ran.error}"
    )
    table = session.evaluate(place.mark)
    cells = [cell for part in table.sections for row in part.rows for cell in row.cells]
    seen = {cell.ranks: cell.text for cell in cells}
    assert seen == {(rank,): str(7 + rank) for rank in range(RANKS)}, f"{seen} {table.unread}"
    session.step(to="end")
    after = session.wait(WITHIN_S)
    assert after.error is None, after.error
    assert not session.runs.all[-1].stops, "it stops there again"


def cases(place: Place) -> list[tuple[str, str]]:
    """Ways and holders of a place: a function of a script has no name before it runs."""
    both = itertools.product(place.ways, HOLDERS)
    return [(way, holder) for way, holder in both if way != "function" or holder != "script"]


def main(rounds: int, only: str) -> int:
    """Play each place `rounds` times, its cases in turn; the exit status."""
    failed = 0
    options = InitOptions(world_size=RANKS, device="cpu")
    with tempfile.TemporaryDirectory() as name, shared_session(options) as session:
        for place in (each for each in PLACES if only in each.name):
            problems = []
            for way, holder in itertools.islice(itertools.cycle(cases(place)), rounds):
                try:
                    play(session, place, way, holder, Path(name).resolve())
                except (AssertionError, DDPError) as error:
                    problems.append(f"{way}, {holder}: {error}"[:400])
            print("\n    ".join([f"{rounds - len(problems)} of {rounds}: {place.name}", *problems]))
            sys.stdout.flush()
            failed += bool(problems)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or ["20"])[0]), (sys.argv[2:] or [""])[0]))
