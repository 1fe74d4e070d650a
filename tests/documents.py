"""The documents of the repository, and the code in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *GUIDES,
    *sorted((ROOT / "results/study").glob("*.md")),
]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Block(NamedTuple):
    """Code between two fences."""

    language: str
    code: str
    line: int


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(found[1], found[2], text[: found.start()].count("\n") + 1)
        for found in re.finditer(r"^```([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


def prose(document: Path) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
