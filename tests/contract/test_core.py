"""The core of a rank's runtime in a process that is no engine: it observes and answers."""

from __future__ import annotations

from pathlib import Path

from support import run_with_torch

CORE = """
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
import torch, torch.distributed as dist
from ddp_notebook.rank.component import Run
from ddp_notebook.rank.core import RankCore
from ddp_notebook.cluster.questions import ask
from ddp_notebook.rank import calls
from ddp_notebook.rank.rank_process import Events, RankProcess

with TemporaryDirectory() as folder:
    process = RankProcess(0, Events(), Path(folder), Path(folder) / "ask")
    core = RankCore(process)
    life = core.lifecycle()
    life.attach()
    life.run_begins(Run(1))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    answer = 41
    dist.all_reduce(torch.ones(2))
    said = {}

    def asks():
        for question, about in ((calls.REPORT, calls.Nothing()),
                                (calls.STACK, calls.StackRequest(True)),
                                (calls.VARIABLES, calls.VariablesRequest(("answer",)))):
            said[question.name] = ask({0: process.questions}, question, about, 30)[0]

    thread = threading.Thread(target=asks)
    thread.start()
    thread.join()
    report = said["report"]
    assert report.initialized and report.run == 1 and report.activity == "busy", report
    assert said["stack"].frames[0].file.endswith("script.py"), said["stack"]
    assert [each.name for each in said["variables"].scopes[-1].variables] == ["answer"]
    life.run_ends()
    dist.destroy_process_group()
    core.questions.close()
"""


def test_any_process_can_be_observed_and_asked(tmp_path: Path) -> None:
    run_with_torch(CORE, tmp_path)
