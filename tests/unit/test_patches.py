"""Changes of the user's code: right where they are offered, and none where that is not sure."""

from __future__ import annotations

import pytest

from ddp_notebook.diagnosis import catalogue
from ddp_notebook.diagnosis.source_code.patch import (
    find_unused_parameters,
    hoist,
    set_epoch,
    through_wrapper,
    wait,
    without_setting,
)

MOVED = {
    "a call in an expression": (
        "if rank == 0:\n    print('accuracy', validate(model))\n",
        "+result = validate(model)\n if rank == 0:\n-    print('accuracy', validate(model))\n"
        "+    print('accuracy', result)",
    ),
    "a statement of its own": (
        "if dist.get_rank() == 0:\n    validate(model)\n",
        "-if dist.get_rank() == 0:\n-    validate(model)\n+validate(model)",
    ),
    "a statement before others": (
        "    if self.rank == 0:\n        self.validate(self.model)\n        self.save()\n",
        "+    self.validate(self.model)\n     if self.rank == 0:\n"
        "-        self.validate(self.model)",
    ),
    "a result for a name of the branch's own": (
        "if rank == 0:\n    accuracy = validate(model)\n    print(accuracy)\n",
        "+accuracy = validate(model)\n if rank == 0:\n-    accuracy = validate(model)",
    ),
    "a result for a name that all ranks have": (
        "best = 0\nif rank == 0:\n    best = validate(model)\nprint(best)\n",
        "+result = validate(model)\n if rank == 0:\n-    best = validate(model)\n"
        "+    best = result",
    ),
    "after a print, where the name is taken, and the letters are not ASCII": (
        "result = 1\nif is_main_process():\n    print('é')\n    write('ü', validate(m), 'é')\n",
        "+result_ = validate(m)\n if is_main_process():\n     print('é')\n"
        "-    write('ü', validate(m), 'é')\n+    write('ü', result_, 'é')",
    ),
    "in a cell, below a magic": (
        "x = 1\n\n%pwd\nif rank == 0:\n    return_value = [validate(model)]\n",
        "+result = validate(model)\n if rank == 0:\n-    return_value = [validate(model)]\n"
        "+    return_value = [result]",
    ),
}


def hoisted(source: str) -> str:
    """The change for a source in which the last `if` is around the last call of validate."""
    if source.startswith("    "):
        source = f"class Trainer:\n  def fit(self):\n{source}"
    lines = source.splitlines()
    test = max(n for n, text in enumerate(lines, 1) if text.lstrip().startswith("if"))
    call = max(n for n, text in enumerate(lines, 1) if "validate(" in text)
    return hoist(source, call, test, "validate")


@pytest.mark.parametrize("name", MOVED)
def test_a_call_is_moved_out_of_its_condition(name: str) -> None:
    source, change = MOVED[name]
    assert hoisted(source) == change
    corrected = catalogue.corrected(source, change)
    assert corrected.index("validate(") < corrected.find("if ") or "if " not in corrected


NOT_MOVED = {
    "an argument made in the branch": "if rank == 0:\n    data = load()\n    validate(data)\n",
    "an argument made in another branch of some ranks": (
        "if rank == 0:\n    data = load()\nif rank == 0:\n    validate(data)\n"
    ),
    "something that prepares it": "if rank == 0:\n    model.eval()\n    validate(model)\n",
    "an else": "if rank == 0:\n    validate(model)\nelse:\n    other()\n",
    "a test of the data": "if loss > 3:\n    validate(model)\n",
    "a test of the rank and of what is passed": (
        "if rank == 0 and hits is not None:\n    validate(hits)\n"
    ),
    "a test that calls with arguments": "if next(ranks) == 0:\n    validate(model)\n",
    "a loop": "if rank == 0:\n    for m in models:\n        validate(m)\n",
    "a part that is not always evaluated": "if rank == 0:\n    x = on and validate(model)\n",
    "a comprehension": "if rank == 0:\n    print([validate(m) for m in models])\n",
    "a call before it in the same line": "if rank == 0:\n    print(now(), validate(model))\n",
    "two calls": "if rank == 0:\n    print(validate(a), validate(b))\n",
    "several lines": "if rank == 0:\n    print(\n        validate(model)\n    )\n",
    "one line": "if rank == 0: validate(model)\n",
    "a statement and a comment": "if rank == 0:\n    validate(model)  # slow\n",
    "two statements on one line": "if rank == 0:\n    print(1); validate(model)\n",
    "code that does not parse": "if rank == 0:\n    validate(model\n",
}


@pytest.mark.parametrize("name", NOT_MOVED)
def test_a_call_stays_where_it_is_not_sure_that_it_may_be_moved(name: str) -> None:
    assert hoisted(NOT_MOVED[name]) == ""


def test_what_follows_an_if_that_is_passed_over_is_not_moved() -> None:
    source = "if test:\n    pass\nelif rank == 0:\n    validate(model)\n"
    assert hoist(source, 4, 3, "validate") == ""
    assert hoist(source, 4, 1, "validate") == ""
    assert hoist("x = 1\n", 1, 1, "validate") == ""


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("model = DDP(Two())", "model = DDP(Two(), find_unused_parameters=True)"),
        (
            "m = nn.parallel.DistributedDataParallel(net, device_ids=ids, )  # ü",
            "m = nn.parallel.DistributedDataParallel(net, device_ids=ids, "
            "find_unused_parameters=True)  # ü",
        ),
        ("é = [DDP(a)]", "é = [DDP(a, find_unused_parameters=True)]"),
        ("model = DDP(Two(), find_unused_parameters=False)", ""),
        ("model = DDP(Two(), **options)", ""),
        ("model = DDP(a), DDP(b)", ""),
        ("model = wrap(Two())", ""),
        ("model = DDP(", ""),
        ("model = DDP(a,\n    static)", ""),
    ],
)
def test_ddp_is_told_to_look_for_unused_parameters(line: str, changed: str) -> None:
    expected = f"-{line}\n+{changed}" if changed else ""
    assert find_unused_parameters(f"import torch\n{line}\n", 2) == expected


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("é = net.module(x).sum()", "é = net(x).sum()"),
        ("y = trainer.module(x)", ""),
        ("y = self.net.module(x)", ""),  # what self.net is may be another thing each time
        ("y = net.module(net.module(x))", ""),
        ("y = module(x)", ""),
        ("y = net(x)", ""),
    ],
)
def test_ddp_is_called_in_place_of_the_module_inside(line: str, changed: str) -> None:
    assert through_wrapper(f"import torch\n{line}\n", 2, "net") == (
        f"-{line}\n+{changed}" * bool(changed)
    )


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("w = all_reduce(t, async_op=True)", " w = all_reduce(t, async_op=True)\n+w.wait()"),
        ("self.w = f(t, async_op=yes)  # later", ""),
        ("all_reduce(t, async_op=True)", "-{line}\n+{line}.wait()"),
        ("all_reduce(t, group=pair, async_op=True)", ""),  # others of the ranks have no handle
        ("all_reduce(t, **options)", ""),
        ("works = [all_reduce(t, async_op=True) for t in all]", ""),
        ("a = b = all_reduce(t, async_op=True)", ""),
        ("works.append(all_reduce(t, async_op=True))", ""),
        ("w = all_reduce(t, async_op=True); t /= 2", ""),
        ("w = all_reduce(t,\n    async_op=True)", ""),
    ],
)
def test_a_collective_is_waited_for_where_it_is_started(line: str, change: str) -> None:
    assert wait(f"import torch\n{line}\n", 2) == change.format(line=line)


SAMPLED = """
sampler = DistributedSampler(data)
for epoch in range(3):
    for x in loader:
        step(x)
"""
CALLED = "+    sampler.set_epoch(epoch)\n     for x in loader:"


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("", "", CALLED),
        ("loader:", "enumerate(loader):", CALLED.replace("loader:", "enumerate(loader):")),
        ("for epoch in range(3)", "while more()", ""),
        ("range(3)", "epochs", ""),  # which may be no numbers, or other ones on each rank
        ("step(x)", "epoch = step(x)", ""),
        ("step(x)", "sampler = step(x)", ""),
        ("sampler =", "samplers['train'] =", ""),
        ("sampler =", "other = DistributedSampler(data)\nsampler =", ""),
        ("sampler =", "def make():\n  sampler =", ""),
        ("for x", "list(loader)\n    for y", ""),  # the line is another one then
        ("DistributedSampler", "make_sampler", ""),
    ],
)
def test_the_epoch_is_set_ahead_of_a_loop_over_batches(old: str, new: str, change: str) -> None:
    source = SAMPLED.replace(old, new) if old else SAMPLED
    moved = source.count("\n") - SAMPLED.count("\n") if old == "sampler =" else 0
    assert set_epoch(source, 4 + moved) == change


SET = 'os.environ["MASTER_PORT"] = str(port())'


@pytest.mark.parametrize(
    ("source", "change"),
    [
        (f"import os\n{SET}\n", f"-{SET}"),
        (f"import os\nif rank:\n    {SET}\n", f"-if rank:\n-    {SET}"),
        (f"import os\ndef f():\n    {SET}\n    g()\n", f"-    {SET}"),
        (f"import os\ndef f():\n    {SET}\n", ""),  # an empty function is none
        (f"import os\nif rank:\n    {SET}\nelse:\n    g()\n", ""),
        (f"import os\nif rank:\n    g()\nelse:\n    {SET}\n", ""),
        (f"import os\n{SET}\nprint(os.environ['MASTER_PORT'])\n", ""),
        (f"import os; {SET}\nx = 1\n", ""),
        ("import os\nos.environ['MASTER_PORT'], x = 1, 2\n", ""),
        ("import os\nos.environ.setdefault('MASTER_PORT', '1')\n", ""),
        ("import os\nsettings['MASTER_PORT'] = '1'\n", ""),
    ],
)
def test_a_variable_is_left_as_the_launcher_set_it(source: str, change: str) -> None:
    assert without_setting(source, "MASTER_PORT") == change
