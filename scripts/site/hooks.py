"""What MkDocs does beyond its plugins: files from outside docs/, and nothing that needs a network.

Pages and pictures of the repository that docs/ links to become part of the site, and so do the
tutorials' pages and the pictures that `scripts/docs.sh` has made. Equations become MathML, the
plan of the rooms an inline SVG, and marks in comments the tables of `results/`.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from bmc_torchrl.analysis.overviews import full_table
from bmc_torchrl.analysis.summaries import read_results, result_folders

ROOT = Path(__file__).parents[2]
OUTSIDE = (
    *("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
    *("results/study/*.md", "results/study/*.png", "results/figures/*.png"),
)
"""Files of the repository that are files of the site, too, by the same path."""


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add what is not in docs/: files of the repository, and what was made for the site."""
    made = Path(config.config_file_path).parent / config.extra["made"]
    found = {
        path.relative_to(ROOT).as_posix(): path for glob in OUTSIDE for path in ROOT.glob(glob)
    }
    found |= {path.relative_to(made).as_posix(): path for path in made.rglob("*") if path.is_file()}
    for name, path in sorted(found.items()):
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links as the site has them, tables of results, and the plan as a picture."""
    uri = page.file.src_uri
    outside = page.file.generated_by is not None and not uri.startswith("tutorials/")
    here = posixpath.dirname(uri if outside else f"docs/{uri}")
    markdown = re.sub(
        r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))",
        lambda link: f"{link[1]}{_moved(link[2], here, uri)}{link[3]}",
        markdown,
    )
    for mark, content in MARKS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, content())
    markdown = re.sub(r"<!-- picture (\w+): (.*?) -->", r"![\2](assets/start-\1.svg)", markdown)
    return re.sub(r"```mermaid\n(.*?)```", lambda plan: drawn(plan[1]), markdown, flags=re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Equations in MathML, which browsers draw by themselves."""
    equation = r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>'
    return re.sub(equation, _in_mathml, html, flags=re.DOTALL)


def _moved(target: str, here: str, uri: str) -> str:
    """Where a link of the repository leads on the site, whose root has docs/ and the rest."""
    path = posixpath.normpath(posixpath.join(here, target))
    if (ROOT / path / "README.md").exists():
        path += "/README.md"
    return posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(uri) or ".")


def _in_mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return convert(html.unescape(found[2]).strip(), display=display)


def benchmark_tables() -> str:
    """``results/benchmark.csv``, a table per section."""
    parts = []
    for section, rows in pd.read_csv(ROOT / "results/benchmark.csv").groupby("section", sort=False):
        lines = [
            f"| {row.work} | {row.ours:,.4g} | {row.peer:,.4g} | {row.ratio:.3g} "
            f"| {'' if pd.isna(row.goal) else row.goal} | {VERDICTS.get(row.met, '')} |"
            for row in rows.itertuples()
        ]
        head = "| work | ours | peer | ratio | goal | met |\n|---|---|---|---|---|---|"
        parts.append("\n".join([f"### {section}\n", head, *lines]))
    return "\n\n".join(parts)


VERDICTS = {True: "yes", False: "**no**"}


def overview() -> str:
    """All experiments, a row each."""
    return full_table(read_results(folder) for folder in result_folders([ROOT / "results"]))


def from_readme(language: str) -> str:
    """The README's only block of code in a language."""
    (block,) = re.findall(rf"```{language}\n.*?```", (ROOT / "README.md").read_text(), re.DOTALL)
    return block


MARKS: dict[str, Callable[[], str]] = {
    "<!-- benchmark -->": benchmark_tables,
    "<!-- overview -->": overview,
    "<!-- readme diff -->": lambda: from_readme("diff"),
    "<!-- readme python -->": lambda: from_readme("python"),
}
"""What stands in a page for what is made of results, or written in the README."""


def drawn(plan: str) -> str:
    """A flowchart of rooms as SVG: every room above all that it imports.

    It reads what docs/architecture.md uses of Mermaid: ``room --> room & room``, and a subgraph,
    whose rooms have another colour.
    """
    arrows = [
        (start, end)
        for start, ends in re.findall(r"^\s*(\w+) --> (.+)$", plan, re.MULTILINE)
        for end in ends.split(" & ")
    ]
    inside, title = re.findall(r"subgraph \w+ \[(.*?)\]\n(.*?)\n\s*end", plan, re.DOTALL)[0][::-1]
    rooms = list(dict.fromkeys(room for arrow in arrows for room in arrow))
    floor = {room: _floor(room, arrows) for room in rooms}
    top = max(floor.values())
    place: dict[str, tuple[float, float]] = {}
    for number in range(top + 1):
        row = {
            room: _middle([place[end][0] for start, end in arrows if start == room])
            for room in rooms
            if floor[room] == number
        }
        across = _apart(sorted(row, key=row.__getitem__), row)
        place |= {room: (x, HEIGHT * (top - number)) for room, x in across.items()}
    lines = "".join(_arrow(place[start], place[end]) for start, end in arrows)
    boxes = "".join(_box(room, *place[room], room in inside) for room in rooms)
    tall = HEIGHT * top + BOX[1] + 8
    return (
        f'<figure class="rooms"><svg viewBox="0 -4 {WIDTH} {tall}" role="img" '
        f'aria-label="which room imports which">{ARROWHEAD}{lines}{boxes}</svg>'
        f"<figcaption><b>Filled</b>: {title}.</figcaption></figure>\n"
    )


WIDTH, HEIGHT, BOX = 720, 76, (104, 30)
ARROWHEAD = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z"/></marker>'
)


def _floor(room: str, arrows: list[tuple[str, str]]) -> int:
    below = [end for start, end in arrows if start == room]
    return 1 + max(_floor(end, arrows) for end in below) if below else 0


def _middle(places: list[float]) -> float:
    return sum(places) / len(places) if places else WIDTH / 2


def _apart(row: list[str], wanted: dict[str, float]) -> dict[str, float]:
    """Rooms of a floor near where they want to be, none over another, all within the picture."""
    gap, found = BOX[0] + 24, {}
    least = BOX[0] / 2
    for index, room in enumerate(row):
        most = WIDTH - BOX[0] / 2 - gap * (len(row) - 1 - index)
        shift = gap * (len(row) - 1) / 2 if len(set(wanted.values())) == 1 else 0
        found[room] = min(max(wanted[room] - shift, least), most)
        least = found[room] + gap
    return found


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (to_x, to_y) = start, end
    y += BOX[1]
    bend = (to_y - y) / 2
    return (
        f'<path class="arrow" marker-end="url(#tip)" d="M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} '
        f'{to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"/>'
    )


def _box(room: str, x: float, y: float, filled: bool) -> str:
    width, height = BOX
    kind = "room core" if filled else "room"
    return (
        f'<rect class="{kind}" x="{x - width / 2:.0f}" y="{y:.0f}" width="{width}" '
        f'height="{height}" rx="5"/><text x="{x:.0f}" y="{y + 20:.0f}">{room}</text>'
    )
