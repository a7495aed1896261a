"""Builds the stand-ins of NVIDIA's libraries that are written in C, for processes of their own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCES = {"libcuda.so.1": "libcuda.c", "libnvidia-ml.so.1": "libnvidia-ml.c"}


def build(folder: Path, *names: str) -> dict[str, str]:
    """Build these libraries; the environment of a process that is to load them.

    Raises FileNotFoundError where there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc)")
    for name in names:
        source = Path(__file__).parent / SOURCES[name]
        options = ("-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name))
        subprocess.run((compiler, *options, str(source), "-ldl"), check=True)
    return {"LD_LIBRARY_PATH": str(folder)}
