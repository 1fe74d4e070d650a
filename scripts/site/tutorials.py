"""Tutorials from scripts: python scripts/site/tutorials.py FOLDER [NAME …].

A script in percent format (``# %%`` begins a cell, ``# %% [markdown]`` one of text) is run cell by
cell. Its page has text, code, what was printed, and the figures that were open; its notebook has
the same.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

SCRIPTS = Path(__file__).parents[2] / "docs/tutorials"
STYLE = Path(__file__).with_name("site.mplstyle")


@dataclass
class Cell:
    """A part of a tutorial, and what came of running it."""

    text: str
    is_code: bool
    printed: str = ""
    figures: list[bytes] = field(default_factory=list)


def cells(source: str) -> list[Cell]:
    """The parts of a script; its docstring's first line is the title."""
    title, _, lead = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    found = [Cell(f"# {title.rstrip('.')}\n{lead}".strip(), is_code=False)]
    for kind, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", source, re.MULTILINE):
        is_code = "[markdown]" not in kind
        text = body if is_code else re.sub(r"^# ?", "", body, flags=re.MULTILINE)
        found.append(Cell(text.strip("\n"), is_code))
    return found


def run(parts: list[Cell], name: str) -> None:
    """Run the code cells one after another, and keep what they print and draw.

    They are a module called ``__main__``, as in a notebook, in an empty folder.
    """
    main = types.ModuleType("__main__")
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mpl.rc_context(fname=STYLE),
        warnings.catch_warnings(),
        _as_main(main),
    ):
        warnings.simplefilter("ignore")
        for part in parts:
            if part.is_code:
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(compile(part.text, f"{name}.py", "exec"), vars(main))
                part.printed = printed.getvalue()
                part.figures = list(_open_figures())


@contextlib.contextmanager
def _as_main(module: types.ModuleType) -> Iterator[None]:
    """Let what is defined in a module be found there, by pickle for one."""
    before, path = sys.modules["__main__"], [*sys.path]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"], sys.path[:] = before, path


def _open_figures() -> Iterator[bytes]:
    for number in plt.get_fignums():
        stream = io.BytesIO()
        plt.figure(number).savefig(stream, format="png")
        plt.close(number)
        yield stream.getvalue()


def write(parts: list[Cell], name: str, folder: Path) -> None:
    """The page, its figures and the notebook, beside each other; the script is there."""
    folder.mkdir(parents=True, exist_ok=True)
    links = f"[notebook]({name}.ipynb){{ download }} · [script]({name}.py){{ download }}"
    page, number = [parts[0].text, f"Download: {links}"], 0
    for part in parts[1:]:
        page.append(f"```python\n{part.text}\n```" if part.is_code else part.text)
        if part.printed:
            page.append(f'```text title="printed"\n{part.printed.rstrip()}\n```')
        for figure in part.figures:
            number += 1
            (folder / f"{name}-{number}.png").write_bytes(figure)
            page.append(f"![What the code above has drawn]({name}-{number}.png){{ .drawn }}")
    (folder / f"{name}.md").write_text("\n\n".join(page) + "\n")
    (folder / f"{name}.ipynb").write_text(json.dumps(notebook(parts), indent=1, ensure_ascii=False))


def notebook(parts: list[Cell]) -> dict[str, object]:
    """The cells in Jupyter's format, version 4.5."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": kernel},
        "cells": [_jupyter(part, index) for index, part in enumerate(parts)],
    }


def _jupyter(part: Cell, index: int) -> dict[str, object]:
    common = {"id": f"cell-{index}", "metadata": {}, "source": part.text}
    if not part.is_code:
        return {"cell_type": "markdown", **common}
    outputs: list[dict[str, object]] = []
    if part.printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": part.printed})
    for figure in part.figures:
        data = {"image/png": base64.b64encode(figure).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return {"cell_type": "code", "execution_count": None, "outputs": outputs, **common}


def main(folder: Path, *names: str) -> None:
    for script in sorted(SCRIPTS.glob("*.py")):
        if not names or script.stem in names:
            print(f"running {script.name} ...", flush=True)
            parts = cells(script.read_text())
            run(parts, script.stem)
            write(parts, script.stem, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
