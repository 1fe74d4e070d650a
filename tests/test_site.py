"""The site is built without a warning, needs no network, and its tutorials run."""

from __future__ import annotations

import ast
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import contracts
import pictures
import pytest
import tutorials
from documents import ROOT
from mkdocs.commands.build import build
from mkdocs.config import load_config

CONFIG = ROOT / "scripts/site/mkdocs.yml"
SCRIPTS = sorted(tutorials.SCRIPTS.glob("*.py"))


class Page(HTMLParser):
    """What a page fetches when it is opened, where its links lead, and the names of its parts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = set()
        self.equations = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attributes}
        self.anchors |= {known[name] for name in ("id", "name") if name in known}
        self.equations += tag == "math"
        if "src" in known:
            self.fetched.append(known["src"])
        if tag == "link" and known.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(known["href"])
        if tag == "a" and "href" in known:
            self.linked.append(known["href"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_site_is_built_without_a_warning_and_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, built = tmp_path / "made", tmp_path / "site"
    pictures.main(made / "assets")
    for script in SCRIPTS:
        tutorials.write(tutorials.cells(script.read_text()), script.stem, made / "tutorials")
    monkeypatch.setenv("BMC_SITE_MADE", str(made))
    build(load_config(str(CONFIG), strict=True, site_dir=str(built)))
    pages = {path: Page(path) for path in built.rglob("*.html") if path.name != "404.html"}
    assert lost(pages) == []
    assert [url for page in pages.values() for url in page.fetched if urlsplit(url).netloc] == []
    styles = "".join(path.read_text() for path in built.rglob("*.css"))
    assert re.findall(r"url\(\W?(?:https?:)?//", styles) == []
    text = {str(path.relative_to(built)): path.read_text() for path in pages}
    # Drawn by us or by the browser, and not by a script from elsewhere.
    assert [name for name, html in text.items() if 'class="mermaid"' in html] == []
    assert [name for name, html in text.items() if "arithmatex" in html] == []
    assert pages[built / "method.html"].equations > 10
    assert "<text" in text["architecture.html"]
    roles = r":(?:math|class|meth|func):"
    assert [name for name, html in text.items() if re.search(roles, without_sources(html))] == []
    for script in SCRIPTS:
        assert (built / "tutorials" / f"{script.stem}.ipynb").exists()
    assert "beta_moment_match" in (built / "search/search_index.js").read_text()


def without_sources(html: str) -> str:
    return re.sub(r"<details.*?</details>", "", html, flags=re.DOTALL)


def lost(pages: dict[Path, Page]) -> list[str]:
    """What is fetched or linked within the site and is not there."""
    missing = []
    for path, page in pages.items():
        for url in [*page.fetched, *page.linked]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            anchors = pages[target].anchors if target in pages else set()
            named = not parts.fragment or target not in pages or unquote(parts.fragment) in anchors
            if not target.exists() or not named:
                missing.append(f"{path.name}: {url}")
    return missing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_ends_with_a_check(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contracts, "FACTORIES", dict(contracts.FACTORIES))
    source = script.read_text()
    parts = tutorials.cells(source)
    code = [part.text for part in parts if part.is_code]
    assert "assert" in code[-1]
    tutorials.run(parts, script.stem)
    tutorials.write(parts, script.stem, tmp_path)
    page = (tmp_path / f"{script.stem}.md").read_text()
    assert any(part.printed for part in parts)
    for figure in re.findall(r"\((\S+\.png)\)", page):
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    notebook = json.loads((tmp_path / f"{script.stem}.ipynb").read_text())
    cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert ast.dump(ast.parse("\n".join(cells))) == ast.dump(
        ast.Module(ast.parse(source).body[1:], type_ignores=[])
    )
