"""Compiles a cell in the notebook before any rank runs it, so that a typing error costs nothing."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import CodeType

from ddp_notebook.errors import CellSyntaxError


def ipython_syntax(source: str) -> str:
    """Turn magics and shell escapes in `source` into Python."""
    from IPython.core.inputtransformer2 import TransformerManager

    transformed: str = TransformerManager().transform_cell(source)
    return transformed


def check_cell(source: str, transform: Callable[[str], str]) -> bool:
    """Compile a cell here, before any rank runs it; True when it has a top-level `await`.

    Raises CellSyntaxError with the notebook's own line numbers (the magic is line 1).
    """

    def compiled(python: str) -> CodeType:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(python, "<cell>", "exec", flags=flags, dont_inherit=True)
        return code

    try:
        try:  # most cells are plain Python and need no transformation
            code = compiled(source)
        except SyntaxError:
            code = compiled(transform(source))
    except SyntaxError as error:
        error.lineno = (error.lineno or 0) + 1
        raise CellSyntaxError(error) from None
    except ValueError as error:  # a null character
        raise CellSyntaxError(SyntaxError(str(error), ("<cell>", 1, 1, ""))) from None
    return bool(code.co_flags & inspect.CO_COROUTINE)
