"""What a user sees of ranks that stand: after an error, at a NaN, in other frames."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from results import rows, texts, values

from ddp_notebook.errors import UsageMistake
from ddp_notebook.rank.calls import Breakpoint
from ddp_notebook.session import Session
from ddp_notebook.views import stacks


@pytest.fixture(autouse=True)
def nothing_set(ranks2: Session) -> Iterator[None]:
    """Each test begins without breakpoints and with idle ranks."""
    yield
    ranks2.breakpoints.clear()
    ranks2.looking.unwatch("")
    if any(not run.done for run in ranks2.runs.all):
        ranks2.abort()


RAISES = (
    "import torch\ndef inner(x):\n    here = x * 2\n    if rank == 1:\n"
    "        raise ValueError('bad')\n    dist.barrier()\n    return here\n"
    "def outer(n):\n    above = n + rank\n    return inner(n)\nouter(3)\n"
)


def test_after_an_error_the_frames_of_all_ranks_can_be_looked_into(ranks2: Session) -> None:
    """Rank 1 raised, rank 0 waits for it: both are looked into; then both have ended."""
    result = ranks2.run_cell(RAISES)
    assert result.pending == (0,)
    assert values(ranks2.evaluate("here")) == {(0, 1): "6"}
    assert values(ranks2.evaluate("above", up=1)) == {(0,): "3", (1,): "4"}
    tree = ranks2.where((1,), locals=True)
    assert "here" in str(tree)
    stands = {each.ranks: [f.function for f in each.frames] for each in ranks2.looking.stands(None)}
    assert set(map(tuple, stands.values())) == {("inner", "outer", "<module>")}
    ranks2.looking.choose("up", None)
    assert values(ranks2.evaluate("above")) == {(0,): "3", (1,): "4"}
    with pytest.raises(UsageMistake, match=r"There is no frame 3: they are 0 \(innermost\) to 2"):
        ranks2.looking.choose("3", None)
    ranks2.abort()
    ranks2.run_cell("x = 1")
    assert ranks2.looking.up == 0
    with pytest.raises(UsageMistake, match="No rank is in your code"):
        ranks2.looking.choose("", None)
    assert values(ranks2.evaluate("x")) == {(0, 1): "1"}


def test_it_stops_where_an_error_ends_a_cell_and_nowhere_else(ranks2: Session) -> None:
    row = ranks2.breakpoints.add("", Breakpoint(0, on="exception"))
    assert row.text.endswith(": an error that ends the cell or script. Not reached yet")
    caught = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    print('caught')\n"
    assert ranks2.run_cell(caught).steps is None
    stopped = ranks2.run_cell(RAISES)
    table = rows(stopped.steps)
    assert "line 6, in inner: raise ValueError('bad')" in table[(1,)]
    assert "raised ValueError" in table[(1,)]
    assert values(ranks2.evaluate("here", (1,))) == {(1,): "6"}
    assert values(ranks2.evaluate("above", (1,), up=1)) == {(1,): "4"}
    with pytest.raises(UsageMistake, match="an error was raised"):
        ranks2.step((1,), to="4")
    ranks2.step((1,))
    assert any(f.ename == "ValueError" for f in ranks2.runs.all[-1].events.finished.values())
    ranks2.abort()
    ranks2.run_cell(RAISES)
    ranks2.abort()
    assert ranks2.run_cell("dist.barrier()").error is None


TRAINS = (
    "import torch\nnet = DDP(torch.nn.Linear(2, 1))\n"
    "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    "def train(steps):\n    for i in range(steps):\n        optimizer.zero_grad()\n"
    "        loss = net(torch.ones(4, 2)).sum()\n"
    "        if i == 2 and rank == bad:\n            loss = loss * float('nan')\n"
    "        loss.backward()\n        optimizer.step()\n    return i\n"
)


def test_it_stops_at_the_first_loss_or_gradient_that_is_not_finite(ranks2: Session) -> None:
    ranks2.breakpoints.add("", Breakpoint(0, on="nan"))
    assert ranks2.run_cell(f"{TRAINS}bad = 7\ntrain(4)\nprint('trained')").steps is None
    stopped = ranks2.run_cell("bad = 1\ntrain(4)\nprint('through')\n")
    at = rows(stopped.steps)
    assert "loss.backward()" in at[(1,)]
    assert "the loss is not finite: NaN" in at[(1,)]
    assert "rank 0  waiting in backward (torch.autograd)" in stacks.text(ranks2.where())
    assert values(ranks2.evaluate("i", (1,))) == {(1,): "2"}
    # From there it comes to the other ranks with the gradients: they had it not first.
    ranks2.step((1,), to="end")
    ranks2.wait(10)
    (row,) = ranks2.breakpoints.rows()
    assert row.text.endswith("Rank 0: not reached yet; rank 1: 1 hit, over")
    again = ranks2.run_cell(f"{TRAINS}bad = 1\ntrain(4)\n")
    assert values(ranks2.evaluate("i", (1,))) == {(1,): "2"}, "the first of each run"
    assert set(rows(again.steps)) == {(0,), (1,)}
    ranks2.step(to="end")
    ranks2.wait(10)
    ranks2.breakpoints.clear()
    assert ranks2.run_cell("train(4)\nprint(torch.autograd.backward.__module__)").error is None


def test_it_stops_at_the_first_gradient_that_is_not_finite(ranks2: Session) -> None:
    ranks2.run_cell(
        f"{TRAINS}bad = 7\n"
        "hook = net.module.weight.register_hook(lambda g: g * (float('nan') if rank else 1))\n"
    )
    ranks2.breakpoints.add("", Breakpoint(0, on="nan"))
    at = rows(ranks2.run_cell("train(4)").steps)
    assert "optimizer.step()" in at[(0, 1)]
    assert "the gradient of parameter 1 of 2 is not finite" in at[(0, 1)]
    ranks2.step(to="end")
    assert ranks2.wait(10).error is None


SCALES = (
    "from torch.amp import GradScaler\nscaler = GradScaler('cpu', init_scale=2.0**127)\n"
    "def scaled(steps):\n    for i in range(steps):\n        optimizer.zero_grad()\n"
    "        loss = net(torch.ones(4, 2)).sum() * 100\n"
    "        if i == bad and rank == 1:\n            loss = loss * float('nan')\n"
    "        scaler.scale(loss).backward()\n        scaler.step(optimizer)\n"
    "        scaler.update()\n    return scaler.get_scale()\n"
)


def test_a_scale_that_a_grad_scaler_tries_is_no_loss_that_is_not_finite(ranks2: Session) -> None:
    plain = "print(GradScaler.scale.__code__.co_filename.rpartition('/')[2])"
    ranks2.run_cell(f"{TRAINS}{SCALES}bad = 7")
    ranks2.breakpoints.add("", Breakpoint(0, on="nan"))
    through = ranks2.run_cell("print(scaled(3) < 2.0**127)")
    assert (through.steps, through.error) == (None, None)
    assert "True" in texts(through), "it has skipped steps"
    at = rows(ranks2.run_cell("bad = 1\nscaled(3)").steps)
    assert "the loss is not finite: NaN" in at[(1,)]
    ranks2.step(to="end")
    ranks2.wait(10)
    ranks2.breakpoints.clear()
    assert "not_finite.py" not in texts(ranks2.run_cell(plain)), "as it was before"


def test_gradients_that_a_grad_scaler_skips_at_any_scale_are_not_finite(ranks2: Session) -> None:
    ranks2.run_cell(
        f"{TRAINS}{SCALES}bad, old = 7, net.module.weight.register_hook\n"
        "scaler = GradScaler('cpu', init_scale=8.0)\n"
        "hook = old(lambda g: g * (float('nan') if rank and lets < 0 else 1))\nlets = 9\n"
    )
    ranks2.breakpoints.add("", Breakpoint(0, on="nan"))
    assert ranks2.run_cell("scaled(3)").steps is None
    at = rows(ranks2.run_cell("lets = -1\nscaled(9)").steps)[(0, 1)]
    assert "scaler.step(optimizer)" in at
    assert "the gradient of parameter 1 of 2 is not finite: 2 NaN of 2 values" in at
    assert "skips this step, after 3 skipped, and its scale of 1 is no longer what makes it" in at
    ranks2.step(to="end")
    assert ranks2.wait(10).error is None
    ranks2.breakpoints.clear()
    plain = "print(GradScaler.step.__code__.co_filename.rpartition('/')[2])"
    assert "not_finite.py" not in texts(ranks2.run_cell(plain)), "as it was before"


def test_every_collective_pauses_while_that_is_set(ranks2: Session) -> None:
    ranks2.breakpoints.add("", Breakpoint(0, on="collective"))
    with pytest.raises(UsageMistake, match="pauses every rank"):
        ranks2.breakpoints.add("", Breakpoint(0, on="collective", ranks=(1,)))
    result = ranks2.run_cell("dist.barrier()\ndist.barrier()\nprint('over')\n")
    assert {text[:7] for text in rows(result.steps).values()} == {"barrier"}
    ranks2.step(to="end")
    assert "over" in texts(ranks2.wait(10))
    ranks2.breakpoints.clear()
    assert ranks2.run_cell("dist.barrier()").steps is None


def test_collectives_are_not_issued_by_expressions_of_some_ranks(ranks2: Session) -> None:
    source = "import torch\nt = torch.ones(1)\ndef total():\n    dist.all_reduce(t)\n    return t\n"
    source += "from functools import reduce\ndef reduced(of):\n    return reduce(int.__add__, of)\n"
    ranks2.run_cell(f"{source}breakpoint()\nx = 1\n")
    for expression in ("dist.barrier()", "total()", "[total() for i in range(2)]"):
        (why,) = values(ranks2.evaluate(expression, (1,))).values()
        assert "it may issue a collective" in why
    assert values(ranks2.evaluate("total().item()")) == {(0, 1): "2.0"}
    for harmless in ("reduced([1, 2])", "t.reshape(1).gather(0, torch.tensor([0])).item() * 0 + 3"):
        assert values(ranks2.evaluate(harmless, (0,))).keys() == {(0,)}
        assert next(iter(values(ranks2.evaluate(harmless, (0,))).values())) in ("3", "3.0")
    ranks2.step(to="end")
    ranks2.wait(10)
    (why,) = values(ranks2.evaluate("dist.barrier()")).values()
    assert "%%ddp cell" in why
    assert ranks2.run_cell("dist.barrier()").error is None


def test_values_are_compared_and_watched(ranks2: Session) -> None:
    ranks2.run_cell(
        "import torch\nbig = torch.zeros(300, 700)\nif rank == 1:\n    big[123, 456] = 1\n"
        "class Odd:\n    calls = []\n    def __repr__(self):\n        self.calls.append(1)\n"
        "        return f'odd {rank}'\n    @property\n    def costly(self):\n"
        "        raise RuntimeError('no')\nclass Broken:\n    def __repr__(self):\n"
        "        raise OSError('no')\nodd, broken = Odd(), Broken()\nbreakpoint()\n"
        "for i in range(3):\n    j = i * (rank + 1)\n"
    )
    (section,) = ranks2.evaluate("big").sections
    assert "first at [123, 456]" in "".join(cell.note for cell in section.rows[0].cells)
    assert values(ranks2.evaluate("odd")) == {(0, 1): "<Odd>"}
    assert values(ranks2.evaluate("len(odd.calls)")) == {(0, 1): "0"}
    assert values(ranks2.evaluate("odd", own_text=True)) == {(0,): "odd 0", (1,): "odd 1"}
    assert values(ranks2.evaluate("object()", own_text=True)) == {(0, 1): "<object object at 0x…>"}
    assert values(ranks2.evaluate("broken")) == {(0, 1): "<Broken>"}
    assert values(ranks2.evaluate("broken", own_text=True)) == {(0, 1): "raised OSError: no"}
    assert values(ranks2.evaluate("odd.costly")) == {(0, 1): "raised RuntimeError: no"}
    ranks2.looking.watch("j")
    ranks2.looking.watch("i")
    ranks2.step()
    ranks2.step()
    ranks2.step()
    table = ranks2.step()
    assert table.details[-2].startswith("j: 0 (")
    assert table.details[-1].startswith("i: 1 (")
    ranks2.looking.unwatch("j")
    with pytest.raises(UsageMistake, match="watched: i"):
        ranks2.looking.unwatch("k")
    ranks2.step(to="end")


DIFFERENT = (
    "import torch, numpy\nclass Config:\n    pass\nconfig = Config()\nconfig.lr = rank\n"
    "text = 'a' * 5000 + str(rank)\nitems = [*range(100_000), rank]\nsame = [*range(100_000)]\n"
    "lists = [[i, [i] * 50] for i in range(3000)]\nlists[2999][1][49] -= rank\n"
    "t = torch.zeros(800)\nt[700] = rank * 0.5\nbig = torch.zeros(5_000_000)\nbig[-1] = rank\n"
    "array = t.numpy()\nclass Long:\n    def __repr__(self):\n        return text\nlong = Long()\n"
)


def test_what_differs_past_what_is_shown_is_not_called_equal(ranks2: Session) -> None:
    ranks2.run_cell(DIFFERENT).raise_for_error()
    for source in ("config", "text", "items", "lists", "{'a': {'b': {'c': [rank]}}}"):
        assert set(values(ranks2.evaluate(source))) == {(0,), (1,)}, source
    for source in ("same", "torch.zeros(9)", "[config.__class__, None]"):
        assert set(values(ranks2.evaluate(source))) == {(0, 1)}, source
    assert set(values(ranks2.evaluate("long", own_text=True))) == {(0,), (1,)}
    assert set(values(ranks2.variables(["text", "items"]))) == {(0,), (1,)}

    def note(source: str) -> str:
        return ranks2.evaluate(source).sections[0].rows[0].cells[1].note

    exact = "max difference 0.5, first at [700]"
    assert note("t") == note("array") == note("t * 1") == exact
    assert note("big") == "max difference 1 or more, first at [4999999]"
    odd = "torch.tensor([1., 2., 3., 4., 6., float('inf'), float('nan')])"
    assert "mean inf, 1 NaN, 1 inf, hash " in values(ranks2.evaluate(odd))[(0, 1)]
    assert "mean 3, std 1.581, hash" in values(ranks2.evaluate("torch.arange(1., 6.)"))[(0, 1)]


COMPILED = (
    "import torch\nfrom torch.utils.data import DataLoader, Dataset\n"
    "def inner(x):\n    return x * 2\n"
    "@torch.compile(backend='eager', fullgraph=True)\ndef whole(x):\n    return inner(x) + 1\n"
    "class Part(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    "model = torch.compile(torch.nn.Sequential(Part()), backend='eager', fullgraph=True)\n"
    "@torch.compile(backend='eager')\ndef breaks(x):\n    return x * 3\n"
    "class Data(Dataset):\n    def __len__(self):\n        return 4\n"
    "    def __getitem__(self, i):\n        return i\n"
    "loader = DataLoader(Data(), num_workers=2)\nhere = DataLoader(Data())\n"
)


def test_a_function_that_was_compiled_at_a_breakpoint_can_have_another_one(
    ranks2: Session,
) -> None:
    ranks2.run_cell(
        "import torch\ndef inner(x):\n    return x * 2\n"
        "@torch.compile(backend='eager')\ndef outer(x):\n    return inner(x) + 1\n"
    ).raise_for_error()
    for call in ("outer(torch.ones(1))", "inner(1)"):
        ranks2.breakpoints.add("inner", Breakpoint(0))
        assert "return x * 2" in rows(ranks2.run_cell(call).steps)[(0, 1)]
        ranks2.breakpoints.clear()
        ranks2.step(to="end")
        assert ranks2.wait(60).error is None
    ranks2.run_cell("exec(compile('def made(x):\\n    return x\\n', 'made.py', 'exec'), globals())")
    ranks2.breakpoints.add("made", Breakpoint(0))
    assert "made.py, line 2, in made" in rows(ranks2.run_cell("made(1)").steps)[(0, 1)]


def test_where_nothing_can_stop_is_said(ranks2: Session, tmp_path: Path) -> None:
    """In what is compiled as a whole, and in workers; and the code runs as without a breakpoint."""
    ranks2.run_cell(COMPILED).raise_for_error()
    row = ranks2.breakpoints.add("breaks", Breakpoint(0))
    assert "Not reached yet" in row.text
    assert "breaks compiled; while this breakpoint is" in row.text
    ranks2.breakpoints.clear()
    row = ranks2.breakpoints.add("Data.__getitem__", Breakpoint(0))
    assert "2 worker processes run it too, and do not stop there" in row.text
    result = ranks2.run_cell(
        "done = f'{whole(torch.ones(1))} {model(torch.ones(1))} {[int(i) for i in loader]}'\n"
        "print(done)"
    )
    assert result.error is None, result.error
    assert "A breakpoint was passed at cell " in texts(result)  # once, or for each rank
    assert "tensor([3.]) tensor([2.]) [0, 1, 2, 3]" in texts(result)
    stopped = ranks2.run_cell("list(here)")
    assert "in Data.__getitem__" in rows(stopped.steps)[(0, 1)]


def test_what_is_compiled_runs_as_python_while_it_has_a_breakpoint(ranks2: Session) -> None:
    """Whether it was compiled before or after; and is then compiled again. All are named."""
    graphs = (
        "import torch\nran = 0\ndef backend(graph, _):\n    def run(*inputs):\n"
        "        global ran\n        ran += 1\n        return graph.forward(*inputs)\n"
        "    return run\n"
        "def inner(x):\n    return x * 2\n"
        "@torch.compile(backend=backend)\ndef twice(x):\n    return inner(x)\n"
        "@torch.compile(backend=backend, fullgraph=True)\ndef whole(x):\n    return inner(x) + 1\n"
    )
    call = "ran = 0\nprint(whole(torch.ones(1)), ran)"
    for before in (call, "pass"):
        ranks2.run_cell(f"{graphs}{before}").raise_for_error()
        row = ranks2.breakpoints.add("inner", Breakpoint(0))
        assert "twice, whole compiled; while this breakpoint is set" in row.text
        for _ in range(2):
            stopped = ranks2.run_cell(call)
            assert "in inner: return x * 2" in rows(stopped.steps)[(0, 1)]
            assert values(ranks2.evaluate("x")) == {(0, 1): "float32 [1] cpu: 1"}
            assert "tensor([3.]) 0" in texts(ranks2.step(to="end") and ranks2.wait(60))
        ranks2.breakpoints.clear()
        assert "tensor([3.]) 1" in texts(ranks2.run_cell(call))


def test_what_is_evaluated_where_torch_compiles_is_not_compiled(ranks2: Session) -> None:
    """It took seconds."""
    ranks2.run_cell(
        "import torch\n@torch.compile(backend='eager')\ndef halves(x):\n    breakpoint()\n"
        "    return x / 2\nhalves(torch.ones(2))\n"
    )
    frames = "torch._dynamo.utils.counters['frames']['total']"
    compiled = values(ranks2.evaluate(frames))  # of each rank: a finalizer's frame counts as well
    assert values(ranks2.evaluate("x")) == {(0, 1): "float32 [2] cpu: 1, 1"}
    assert values(ranks2.evaluate(frames)) == compiled
    ranks2.step(to="end")


def test_a_function_of_a_module_that_is_imported_later(ranks2: Session, tmp_path: Path) -> None:
    """By its own name, and by the one under which another package hands it on."""
    for package in ("imported_later", "imported_last"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(
            f"from {package}.model import Net as Model\n"
        )
        (tmp_path / package / "model.py").write_text(
            "class Net:\n    def forward(self, x):\n        y = x + 1\n        return y\n"
        )
    ranks2.run_cell(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})").raise_for_error()
    for name in ("imported_later.model.Net.forward", "imported_last.Model"):
        package = name.partition(".")[0]
        assert "Pending: not imported yet" in ranks2.breakpoints.add(name, Breakpoint(0)).text
        ranks2.run_cell(f"assert not any({package!r} in name for name in sys.modules)")
        stopped = ranks2.run_cell(f"import {package}\n{package}.Model().forward(rank)\n")
        assert "model.py, line 3, in Net.forward" in rows(stopped.steps)[(0, 1)]
        assert values(ranks2.evaluate("x")) == {(0,): "0", (1,): "1"}
        ranks2.step(to="end")
        assert [r.text.rpartition(". ")[2] for r in ranks2.breakpoints.rows()] == ["1 hit"]
        ranks2.breakpoints.clear()
    for name, why in (
        ("imported_later.model.Net.backward", r"imported_later/model\.py defines no function"),
        ("imported_later.nothing.f", r"imported_later/__init__\.py defines no function"),
        ("not_there_at_all.f", "know no function not_there_at_all.f"),
    ):
        with pytest.raises(UsageMistake, match=why):
            ranks2.breakpoints.add(name, Breakpoint(0))
