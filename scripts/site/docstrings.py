"""Sphinx roles of our docstrings in the Markdown that mkdocstrings reads: a griffe extension."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|obj):`(~?)([^`]+)`")


class SphinxRoles(griffe.Extension):
    """``:math:`` becomes an equation, ``:class:`` and its like a link where there is a target."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object, which nothing has read yet."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value, obj)


def in_markdown(text: str, obj: griffe.Object) -> str:
    """A docstring with links and equations as the site's Markdown has them."""
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r"\.\. math:: ((?:.|\n)+?)(?=\n\s*\n|\Z)", _display, text)
    # A doctest that is in no section "Examples" would be read as a sentence.
    text = re.sub(r"^(>>> .*(?:\n.+)*)", r"```pycon\n\1\n```", text, flags=re.MULTILINE)
    return ROLE.sub(lambda found: _link(found[2], bool(found[1]), obj), text)


def _display(found: re.Match[str]) -> str:
    return "$$" + " ".join(found[1].split()) + "$$"


def _link(name: str, short: bool, obj: griffe.Object) -> str:
    try:
        target = name if name.startswith("bmc_torchrl.") else obj.resolve(name)
    except griffe.NameResolutionError:
        target = name
    shown = name.rpartition(".")[2] if short else name
    return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'
