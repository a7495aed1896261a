"""The package was upgraded under a kernel, or another is too old: said before ranks start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ddp_notebook
from ddp_notebook.doctor import examination
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


@pytest.mark.parametrize(
    ("name", "version", "oldest"),
    [
        ("torch", "2.7.1+cpu", "2.8"),
        ("ipykernel", "6.28.0", "6.29"),
        ("ipyparallel", "8.8.0", "9.0"),
    ],
)
def test_a_package_that_is_too_old_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str, oldest: str
) -> None:
    def installed(version: str) -> None:
        folder = tmp_path / f"{name}-0.dist-info"
        folder.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)

    monkeypatch.syspath_prepend(str(tmp_path))
    installed(f"{oldest}.0a0+git1")
    preflight.check_versions()
    installed(version)
    with pytest.raises(UsageMistake) as told:
        Session().init(InitOptions(world_size=1))
    assert str(told.value) == (
        f"{name} {version} is older than {oldest}, the oldest with which ranks start: type "
        f'{sys.executable} -m pip install "{name}>={oldest}" in a shell, and restart the kernel.'
    )
    if name != "torch":  # of which the doctor asks a new process
        check = examination._check_installed(name)
        assert check.found == f"{version} is older than {oldest}, the oldest supported"
