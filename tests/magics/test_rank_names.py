"""Tab, Shift-Tab and `obj?` in a `%%ddp` cell know the variables of the ranks."""

from __future__ import annotations

import time
from typing import Any

from kernels import Kernel
from support import eventually

from ddp_notebook.launch.timeouts import scaled_for_load
from ddp_notebook.views.ansi import strip_ansi

MODEL = """%%ddp
import torch
class Net(torch.nn.Module):
    "A net of two layers."
    def __init__(self):
        super().__init__()
        self.first_layer = torch.nn.Linear(2, 3)
    @property
    def fragile(self):
        touched.append(rank)
        raise RuntimeError("looked at")
    def scale_by(self, factor: float = 2.0):
        "Multiply everything."
touched, batches, state = [], [], {"epoch": 1}
net = Net()
if rank == 1: only_on_one = 1"""


def offered(kernel: Kernel, code: str) -> list[str]:
    reply: Any = kernel.client.complete(code, reply=True, timeout=30)["content"]
    return [match.removeprefix(".") for match in reply["matches"]]


def told(kernel: Kernel, code: str, at: int | None = None) -> str:
    reply: Any = kernel.client.inspect(code, at, reply=True, timeout=30)["content"]
    return strip_ansi(reply["data"]["text/plain"]) if reply["found"] else ""


def test_tab_and_shift_tab_and_questions_know_the_variables_of_the_ranks() -> None:
    with Kernel() as kernel:
        kernel.init(2)
        kernel.run_well(MODEL)
        kernel.run_well("net = 'the notebook has another'\nnotebooks_own = 1")
        # Tab
        assert {"first_layer", "scale_by", "fragile"} <= set(offered(kernel, "%%ddp\nnet."))
        assert "upper" not in offered(kernel, "%%ddp\nnet.")
        assert "weight" in offered(kernel, "%%ddp\nx = 1\nnet.first_layer.w")
        assert offered(kernel, "%%ddp\nx = net.sc") == ["scale_by"]
        assert offered(kernel, "%%ddp\nbatch_size = 3\nbat") == ["batch_size", "batches"]
        assert offered(kernel, "%%ddp\nonly_o") == []
        assert offered(kernel, "%%ddp --ranks 1\nonly_o") == ["only_on_one"]
        assert offered(kernel, "%%ddp --ra") == ["--ranks"]
        assert offered(kernel, "%%ddp -r 1\nnet.sc") == ["scale_by"], "not yet written right"
        assert offered(kernel, "net.upp") == ["upper"]
        assert any("epoch" in each for each in offered(kernel, "%%ddp\nstate["))
        # Shift-Tab
        eventually(lambda: "A net of two layers." in told(kernel, "%%ddp\nnet"))  # 0.3 s for each
        code = "%%ddp\nnet.scale_by(3)"
        assert "factor: float = 2.0" in told(kernel, code, len(code) - 2)
        assert told(kernel, "%%ddp\nonly_on_one") == ""
        assert "1" in told(kernel, "%%ddp --ranks 1\nonly_on_one")
        assert "another" in told(kernel, "net")
        # obj?
        shown = strip_ansi(kernel.run_well("%%ddp\nnet?").text)
        assert "A net of two layers." in shown
        assert "── ranks 0 and 1 ──" in shown, "equal answers are shown once"
        assert "def scale_by" in strip_ansi(kernel.run_well("%%ddp --ranks 0\nnet.scale_by??").text)
        # No property was evaluated, and nothing waits for busy ranks.
        assert "[]" in kernel.run_well("%%ddp --ranks 0\ntouched").text
        kernel.run_well("%%ddp --detach\nimport time; time.sleep(60)")
        began = time.monotonic()
        assert offered(kernel, "%%ddp\nbatches.app") == []
        assert told(kernel, "%%ddp\nnet") == ""
        assert time.monotonic() - began < scaled_for_load(3)
        kernel.run_well("%ddp_abort")
        kernel.run_well("%unload_ext ddp_notebook")
        assert "another" in told(kernel, "%%ddp\nnet")
