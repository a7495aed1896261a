"""The check for machines with GPUs, as a dry run on CPUs: it shows that the check itself works."""

from __future__ import annotations

import pytest

from ddp_notebook.session import Session
from tests.gpu.check import Checks

pytestmark = pytest.mark.timeout(180)


def test_the_check_for_gpus_runs_on_cpus(ranks2: Session) -> None:
    for words, check in Checks(ranks2, cuda=False).rows():
        right, seen = check()
        assert right, f"{words}: {seen}"
