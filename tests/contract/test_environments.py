"""Odd environments of a kernel: a session starts, runs cells and tells the truth all the same."""

from __future__ import annotations

import pytest
from kernels import Kernel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SUM = "x = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', x.item())"


@pytest.mark.parametrize(
    "variables",
    [{"PYTHONWARNINGS": "error"}, {"PYTHONOPTIMIZE": "2"}],
    ids=lambda variables: "=".join(*variables.items()),
)
def test_ranks_start_and_run_cells(variables: dict[str, str]) -> None:
    """Where every warning is an error, of the libraries' too; and where docstrings are gone."""
    with Kernel(variables) as kernel:
        kernel.init(1)
        assert "sum 1.0" in kernel.run_well(f"%%ddp\n{SUM}").text
        warned = kernel.run("%%ddp\nimport warnings\nwarnings.warn('of the user')").text
        assert ("UserWarning" in warned) and ("CellFailed" in warned) == ("WARN" in str(variables))
        kernel.run_well("%ddp_restart")
        assert "sum 1.0" in kernel.run_well(f"%%ddp\n{SUM}").text
        kernel.run_well("%ddp_shutdown")
