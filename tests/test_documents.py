"""What the documents say of files, sections, versions and numbers is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from bmc_torchrl.analysis.comparison import compare
from bmc_torchrl.analysis.published_workbooks import read_published
from bmc_torchrl.analysis.summaries import read_results

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *GUIDES,
    ROOT / "results/study/README.md",
]
CITING = [
    path
    for folder in ("bmc_torchrl", "configs", "tests", "scripts", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".yaml", ".md")
]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_links_lead_to_files(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text())
    missing = [
        target
        for target in targets
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert not missing


@pytest.mark.parametrize("document", GUIDES, ids=relative)
def test_files_that_a_guide_names_exist(document: Path) -> None:
    places = "bmc_torchrl|configs|docs|results|scripts|tests"
    named = re.findall(rf"`((?:{places})/[\w./*-]*)`", document.read_text())
    assert [path for path in named if not any(ROOT.glob(path.rstrip("/")))] == []


def test_every_section_that_is_cited_exists() -> None:
    protocol = (ROOT / "docs/protocol.md").read_text()
    sections = set(re.findall(r"^##+ ([\d.]*\d)", protocol, re.MULTILINE))
    cited = {
        (relative(path), section)
        for path in CITING
        for section in re.findall(r"protocol\.md\)? §(\d(?:\.\d)?)", path.read_text())
    }
    cited |= {("docs/protocol.md", section) for section in re.findall(r"§(\d(?:\.\d)?)", protocol)}
    assert {section for _, section in cited} >= {"1", "2", "3", "4"}
    assert [place for place in sorted(cited) if place[1] not in sections] == []


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == version
    assert headings[0] == "Unreleased"
    assert version in headings


def test_a_citation_has_what_the_format_demands() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    paper = citation["preferred-citation"]
    assert paper.keys() >= {"type", "title", "authors", "year", "conference"}
    assert [author["family-names"] for author in paper["authors"]] == ["Gimelfarb", "Sanner", "Lee"]


def test_the_hooks_before_a_commit_are_the_checks_of_ci() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [part["repo"] for part in hooks] == ["local"]
    names = [hook["name"] for hook in hooks[0]["hooks"]]
    checks = (ROOT / ".ci/run").read_text().splitlines()
    assert names == [name for line in checks for name in names if line.startswith(name)]


EXPERIMENTS = {
    "grid-world SARSA": "grid_sarsa",
    "grid-world DQN": "grid_dqn",
    "cart-pole SARSA": "cart_sarsa",
    "cart-pole DQN": "cart_dqn",
    "supply-chain SARSA": "supply_sarsa",
}


@pytest.mark.parametrize("title", EXPERIMENTS)
def test_the_protocol_says_how_well_our_results_agree(published: Path, title: str) -> None:
    name = EXPERIMENTS[title]
    found = compare(
        read_results(ROOT / "results" / name), read_published(published / f"{name}.xlsx")
    )
    medians = found.medians().set_index("metric")
    text = (ROOT / "docs/protocol.md").read_text()
    row = re.search(rf"^\| {title} \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert row is not None
    assert int(row[1]) == medians.loc["all", "pairs"]
    assert float(row[2]) == pytest.approx(medians.loc["all", "median"], abs=0.0051)
    assert float(row[3]) == pytest.approx(medians["median"].max(), abs=0.0051)
