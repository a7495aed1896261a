"""The package is upgraded under a running kernel: that is said before ranks start."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddp_notebook
from ddp_notebook.errors import UsageMistake
from ddp_notebook.session import InitOptions, Session, preflight


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like ours, just loaded."""
    source = tmp_path / "__init__.py"
    source.write_text(f'__version__ = "{ddp_notebook.__version__}"\n')
    monkeypatch.setattr(preflight, "_PACKAGE", tmp_path)
    return source


def test_an_upgrade_under_a_running_kernel_is_refused_before_anything_starts(
    package: Path,
) -> None:
    preflight.check_package()
    package.write_text('"""Later."""\n__version__ = "99.1"\n')
    with pytest.raises(UsageMistake, match=r"99\.1 was installed after.*Restart the kernel"):
        Session().init(InitOptions(world_size=1))
