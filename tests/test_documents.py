"""What the documents say of files, sections, versions and numbers is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import yaml
from documents import DOCUMENTS, GUIDES, ROOT, relative

from bmc_torchrl.analysis.comparison import compare
from bmc_torchrl.analysis.overviews import experiment_tables, readme_table
from bmc_torchrl.analysis.published_workbooks import read_published
from bmc_torchrl.analysis.summaries import read_results, result_folders

CITING = [
    path
    for folder in ("bmc_torchrl", "configs", "tests", "scripts", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".yaml", ".md")
]


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
    recorded = read_results(ROOT / "results" / name).comparison
    assert recorded is not None, f"bmc compare results/{name} … --record"
    assert recorded["z"].tolist() == pytest.approx(found.table["z"].tolist(), rel=1e-3, abs=1e-4)
    medians = found.medians().set_index("metric")
    text = (ROOT / "docs/protocol.md").read_text()
    row = re.search(rf"^\| {title} \| (\d+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert row is not None
    assert int(row[1]) == medians.loc["all", "pairs"]
    assert float(row[2]) == pytest.approx(medians.loc["all", "median"], abs=0.0051)
    assert float(row[3]) == pytest.approx(medians["median"].max(), abs=0.0051)


RATES = {
    "cart-pole SARSA": "tabular cart-pole, 2200 runs, run-steps/s, against bare numba",
    "supply-chain SARSA": "tabular supply-chain, 2200 runs, run-steps/s, against bare numba",
    "cart-pole DQN": "cart-pole DQN, run-steps/s, against one by one, eager torch",
    "grid-world DQN": "grid-world DQN, run-steps/s, against one by one, eager torch",
    "supply-chain DQN": "supply-chain DQN, run-steps/s, against one by one, eager torch",
}


@pytest.mark.parametrize("title", RATES)
def test_the_rates_of_scaling_are_those_measured(title: str) -> None:
    measured = pd.read_csv(ROOT / "results/benchmark.csv").set_index("work")["ours"][RATES[title]]
    text = (ROOT / "docs/scaling.md").read_text()
    row = re.search(rf"^\| {title} \(numba\) \| ([\d.]+) ([kM]) \|", text, re.MULTILINE)
    assert row is not None
    said = float(row[1]) * {"k": 1e3, "M": 1e6}[row[2]]
    assert said == pytest.approx(measured, rel=0.25)


def test_the_tables_of_results_are_those_of_the_results_folder() -> None:
    found = [read_results(folder) for folder in result_folders([ROOT / "results"])]
    for name, written in (("README.md", readme_table), ("docs/results.md", experiment_tables)):
        text = (ROOT / name).read_text()
        assert text.split("<!-- results -->\n")[1].split("<!-- /results -->")[0] == written(found)


def test_the_readme_says_what_the_study_found() -> None:
    cells = pd.read_csv(ROOT / "results/study/cells.csv")
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"On [{cells['task'].nunique()} finite MDPs]" in text
    means = cells.groupby([cells["condition"] == "noise", "strategy"])[["online", "greedy"]].mean()

    def found(strategy: str, noise: bool) -> tuple[str, ...]:
        return tuple(f"{score:.2f}" for score in means.loc[(noise, strategy)])

    ours, theirs = found("bmc", False), found("linear_run_1", False)
    assert f"it earns {ours[0]} of the optimum while training and tests at {ours[1]}" in text
    assert f"linear annealing over the run {theirs[0]} and {theirs[1]}" in text
    noisy = (" and ".join(found(label, True)) for label in ("bmc", "linear_run_1"))
    assert f"from noisy first values {' against '.join(noisy)}." in text


def test_the_readme_is_a_front_door() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    assert [line for line in lines if len(line) > 120] == []
