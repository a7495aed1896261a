"""A tree of stacks in the forms that a notebook asks for."""

from __future__ import annotations

from ddp_notebook.model import StackTree
from ddp_notebook.views import stacks_html, stacks_text


def bundle(tree: StackTree) -> dict[str, str]:
    """The tree as text and as HTML."""
    return {"text/plain": stacks_text.tree(tree), "text/html": stacks_html.tree(tree)}
