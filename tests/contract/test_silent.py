"""Runs that end well and are wrong are told with their cause; healthy ones are left alone."""

from __future__ import annotations

import json
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from silent_cells import BOTH, HANGS, NET, SECOND, WRONG
from sound_cells import RIGHT
from support import eventually

from ddp_notebook.errors import Stuck
from ddp_notebook.model import Diagnosis
from ddp_notebook.rank import calls
from ddp_notebook.session import Session
from ddp_notebook.testing import cluster_of

CASES = Path(__file__).parent.parent / "cases"
LINES = (CASES / "expected.jsonl").read_text().splitlines()
EXPECTED = {case["id"]: case for case in map(json.loads, LINES)}
SILENT = ("c049", "c052", "c055", "c065")
HEALTHY = ("h01", "h04")


def cell(source: str) -> str:
    return NET + textwrap.dedent(source).strip()


def check(diagnosis: Diagnosis | None, category: str, ranks: tuple[int, ...]) -> None:
    """The first finding is this one."""
    assert diagnosis is not None
    first = diagnosis.findings[0]
    assert (first.category.value, first.ranks) == (category, ranks), diagnosis
    assert first.remedy and first.evidence and "\n" not in first.cause + first.remedy


@pytest.mark.parametrize("name", SILENT)
def test_a_script_that_is_silently_wrong_is_told_its_cause(ranks2: Session, name: str) -> None:
    result = ranks2.run_script(str(CASES / f"{name}.py"), store="rank0")
    assert result.error is None
    expected = EXPECTED[name]["expected"]
    check(result.diagnosis, expected["category"], BOTH)
    assert ranks2.why().findings == result.diagnosis.findings  # type: ignore[union-attr]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_is_left_alone(ranks2: Session, name: str) -> None:
    result = ranks2.run_script(str(CASES / f"{name}.py"), store="rank0")
    assert result.error is None
    assert result.diagnosis is None, result.diagnosis
    assert not ranks2.why().findings


@pytest.mark.parametrize("name", WRONG)
def test_a_cell_that_is_silently_wrong_is_told_its_cause(ranks2: Session, name: str) -> None:
    category, ranks, source = WRONG[name]
    result = ranks2.run_cell(cell(source))
    assert result.error is None, result.tracebacks
    check(result.diagnosis, category, ranks)
    assert len(result.diagnosis.findings) == 1, result.diagnosis  # type: ignore[union-attr]


@pytest.mark.parametrize("name", RIGHT)
def test_a_healthy_cell_is_left_alone(ranks2: Session, name: str) -> None:
    result = ranks2.run_cell(cell(RIGHT[name]))
    assert result.error is None, result.tracebacks
    assert result.diagnosis is None, result.diagnosis
    facts: Any = cluster_of(ranks2).ask(BOTH, calls.RUN_FACTS, calls.Nothing(), 5.0)
    assert all(not (each.notes or each.broken) for each in facts.values()), facts


def test_what_a_scripts_main_function_trained_is_known_when_it_is_over(
    ranks2: Session, tmp_path: Path
) -> None:
    for name in ("c052", "c055", "c049", "h04"):
        lines = (CASES / f"{name}.py").read_text().splitlines()
        begin = next(i for i, line in enumerate(lines) if line.startswith("dist.init"))
        body = "\n".join(f"    {line}" for line in lines[begin:])
        script = tmp_path / f"{name}_main.py"
        script.write_text("\n".join([*lines[:begin], "def main():", body, "main()", ""]))
        result = ranks2.run_script(str(script), store="rank0")
        assert result.error is None, result.tracebacks
        if name == "h04":
            assert result.diagnosis is None, result.diagnosis
        else:
            check(result.diagnosis, EXPECTED[name]["expected"]["category"], BOTH)


def test_a_model_of_one_cell_trained_around_its_wrapper_in_another(ranks2: Session) -> None:
    assert ranks2.run_cell(NET).diagnosis is None
    assert ranks2.run_cell("step()").diagnosis is None
    check(ranks2.run_cell("step(net.module)").diagnosis, "ddp-bypass", BOTH)
    assert ranks2.run_cell("print(1)").diagnosis is None


def test_files_of_a_model_do_not_need_us(ranks2: Session) -> None:
    source = NET + (
        "import copy, io, pickle, pickletools\n"
        "text = pickle.dumps(net.module)\n"
        "assert b'ddp_notebook' not in text\n"
        "again = pickle.loads(text)\n"
        "assert torch.equal(again(torch.ones(1, 4)), net.module(torch.ones(1, 4)))\n"
        "assert copy.deepcopy(net.module)(batch()).shape == (3, 2)\n"
    )
    ranks2.run_cell(source).raise_for_error()


def test_a_model_that_has_trained_is_traced_and_scripted_as_without_us(ranks2: Session) -> None:
    for source in (
        "net = model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())\n",
        "net = DDP(torch.nn.Sequential(torch.nn.Linear(3, 2)))\nmodel = net.module\n",
    ):
        ranks2.run_cell(
            f"{source}"
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "for _ in range(2):\n"
            "    net(torch.ones(1, 3)).sum().backward()\n"
            "    optimizer.step()\n"
            "traced = torch.jit.trace(model, torch.ones(1, 3))\n"
            "assert torch.equal(traced(torch.ones(1, 3)), model(torch.ones(1, 3)))\n"
            "torch.jit.script(model)\n"
        ).raise_for_error()


def test_after_an_abort_a_live_model_trains_on_with_right_gradients(ranks2: Session) -> None:
    ranks2.run_cell(NET + "step()").raise_for_error()
    with ThreadPoolExecutor(1) as pool:
        source = "if rank == 0: net(batch()).sum().backward()\n"
        hung = pool.submit(ranks2.run_cell, source, wait="forever")
        eventually(lambda: ranks2.why().doing[0].startswith("waiting"), 10, "rank 0 in backward")
        ranks2.abort()
        hung.result(10)
    result = ranks2.run_cell(
        "import copy\n"
        "torch.manual_seed(7)\n"
        "data = torch.randn(2, 3, 4)\n"
        "for _ in range(3):\n"
        "    alone = copy.deepcopy(net.module)\n"
        "    alone.zero_grad(); net.zero_grad()\n"
        "    net(data[rank]).pow(2).mean().backward()\n"
        "    alone(data.flatten(0, 1)).pow(2).mean().backward()\n"
        "    for mine, right in zip(net.parameters(), alone.parameters()):\n"
        "        torch.testing.assert_close(mine.grad, right.grad)\n"
        "    opt.step()\n"
    )
    result.raise_for_error()
    assert result.diagnosis is None, result.diagnosis


def test_counting_costs_less_than_a_small_forward(ranks2: Session) -> None:
    # Those of other tests count as well, as long as they have names.
    ranks2.run_cell(
        "import gc, torch\n"
        "made = [n for n, v in globals().items() if isinstance(v, torch.optim.Optimizer)]\n"
        "for name in made: del globals()[name]\n"
        "gc.collect()"
    ).raise_for_error()
    ranks2.run_cell(
        NET + "from ddp_notebook.rank import runtime\n"
        "tracker = runtime.current().core.tracker\n"
        "import time\n"
        "for _ in range(20): step()\n"
        "replica = tracker.replica(net)\n"
        "loss, bucket = torch.tensor(1.0), torch.ones(58)\n"
        "costs_s, layer, x = [], torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
        "for _ in range(10):\n"
        "    begin = time.thread_time()\n"
        "    for _ in range(100):\n"
        "        replica.enter(True); replica.inside -= 1\n"
        "        tracker.backward(loss); tracker.bucket(bucket); tracker.stepped(opt)\n"
        "    half = time.thread_time()\n"
        "    for _ in range(100): layer(x).relu().sum()\n"
        "    costs_s.append((half - begin, time.thread_time() - half))\n"
        "counting_s, forward_s = map(min, zip(*costs_s))\n"
        "times = counting_s / forward_s\n"
    ).raise_for_error()
    costs = ranks2.pull("times")
    assert min(costs.values()) < 1.5, costs


@pytest.mark.parametrize("name", HANGS)
def test_a_rank_that_does_not_reduce_what_others_reduce_is_told(ranks2: Session, name: str) -> None:
    category, source = HANGS[name]
    result = ranks2.run_cell(cell(source))
    try:
        assert isinstance(result.error, Stuck), result.error
        check(result.diagnosis, category, () if category == "undecided" else SECOND)
        assert result.diagnosis is not None
        first = result.diagnosis.findings[0]
        # Whichever rank comes second to what does not match is refused it, and does not wait.
        assert first.waiting == (0,) or category == "undecided"
        assert category != "undecided" or "KeyError" in " ".join(first.evidence)
    finally:
        ranks2.abort()


def test_parameters_that_no_rank_uses_are_told_when_torch_refuses_the_next_step(
    ranks2: Session,
) -> None:
    source = HANGS["a parameter that one rank does not use, in a loop"][1]
    result = ranks2.run_cell(cell(source.replace("rank == 0", "rank > 1")))
    check(result.diagnosis, "unused-params", BOTH)


SLOW = """
from torch.utils.data import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * 40
    def __getitem__(self, i):
        if rank == WHO and i % 4 == 0:
            threading.Event().wait(0.005)
        return torch.ones(4)
for x in DataLoader(Slow(), batch_size=4):
    opt.zero_grad()
    net(x).pow(2).mean().backward()
    opt.step()
"""


def test_a_slow_rank_is_named_where_nothing_is_wrong(ranks2: Session) -> None:
    for who in (1, None):
        result = ranks2.run_cell(f"import threading\nWHO = {who}\n{NET}{SLOW}")
        assert result.error is None, result.tracebacks
        assert result.diagnosis is None, "to be slow is no mistake"
        diagnosis = ranks2.why()
        assert not diagnosis.findings and diagnosis.proven
        if who is None:
            assert diagnosis.remarks == ()
        else:
            (remark,) = diagnosis.remarks
            assert remark.ranks == (1,) and "in its DataLoader (cell " in remark.text, remark
