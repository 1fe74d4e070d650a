"""The interactive page computes what the library does: the same stream, step by step, in Chromium.

The page is opened from disk, so that nothing it needs is elsewhere.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import record
import torch
from chromium import CHROMIUM, Page
from tensordict import TensorDict
from torch.distributions import Beta

from bmc_torchrl import BMCEpsilon, NormalGammaPrior

DOCS = Path(__file__).parents[2] / "docs"

browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium, or the like"
)

STREAMS = record.streams()
MOMENTS = [*range(1, 31), *range(250, record.TRANSITIONS + 1, 250)]

CHANGE = """(given) => {
  for (const [id, value] of Object.entries(given)) {
    const control = document.getElementById(`bmc-${id}`);
    if (control.type === "checkbox") control.checked = value; else control.value = value;
    for (const kind of ["input", "change"]) control.dispatchEvent(new Event(kind));
  }
}"""

PAPER = {"stream": "grid_sarsa", "alpha0": 1.0, "offset": 0.01, "a0": 500.0, "b0": 500.0}
PAPER |= {"rewardScale": 1.0, "scaleFree": False, "maskTerminal": False}
SETTINGS = {
    "the paper's prior": {},
    "cart-pole": {"stream": "cart_sarsa", "alpha0": 10.0},
    "a weak prior": {"alpha0": 0.1, "offset": 0.001},
    "a strong one": {"alpha0": 750.0, "offset": 250.0},
    "returns whose variance is hardly believed": {"a0": 0.5, "b0": 0.05},
    "small rewards": {"rewardScale": 0.01},
    "large rewards": {"rewardScale": 100.0},
    "scale-free": {"scaleFree": True},
    "scale-free, small rewards": {"scaleFree": True, "rewardScale": 0.01, "stream": "cart_sarsa"},
    "masked terminal states": {"maskTerminal": True, "rewardScale": 10.0},
    "α₀ = β₀": {"offset": 0.0},
    "above ½": {"offset": -0.01, "rewardScale": 10.0},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(DOCS / "interactive", site / "interactive")
    text = (DOCS / "interactive.md").read_text()
    (site / "interactive" / "index.html").write_text(f"<!doctype html><meta charset=utf-8>{text}")
    (site / "interactive.html").write_text(f"<!doctype html><meta charset=utf-8>{text}")
    with Page(tmp_path_factory.mktemp("profile")) as opened:
        opened.open((site / "interactive" / "index.html").as_uri())
        yield opened


def changed(page: Page, given: dict[str, Any]) -> None:
    """Move the controls, numbers by the fields beside the sliders."""
    names = {
        name if isinstance(value, bool | str) else f"{name}-number": value
        for name, value in given.items()
    }
    page.evaluate(f"({CHANGE})({json.dumps(names)})")


def shown(page: Page, moments: list[int]) -> TensorDict:
    """What the page computed, after so many transitions."""
    wanted = "{alpha, beta, epsilon, logEvidence}"
    taken = f"Object.values({wanted}).map((c) => {json.dumps(moments)}.map((m) => c[m]))"
    columns = page.evaluate(
        f"(({wanted}) => {taken})(document.getElementById('bmc-interactive').trace)"
    )
    names = ("alpha", "beta", "epsilon", "log_evidence")
    values = (torch.tensor(column, dtype=torch.float64) for column in columns)
    return TensorDict(dict(zip(names, values, strict=True)), [len(moments)])


def recorded_returns(given: dict[str, Any]) -> TensorDict:
    stream = STREAMS[given["stream"]]
    greedy, uniform = (
        torch.tensor(stream[name], dtype=torch.float64) / stream["perUnit"] * given["rewardScale"]
        for name in ("greedyReturns", "uniformReturns")
    )
    if given["maskTerminal"]:
        for end, reward in zip(stream["episodeEnds"], stream["terminalRewards"], strict=True):
            if reward is not None:
                greedy[end] = uniform[end] = reward / stream["perUnit"] * given["rewardScale"]
    return TensorDict({"greedy_return": greedy, "uniform_return": uniform}, greedy.shape)


def of_the_library(given: dict[str, Any], moments: list[int]) -> TensorDict:
    """The same by ``BMCEpsilon``."""
    prior = NormalGammaPrior(a0=given["a0"], b0=None if given["scaleFree"] else given["b0"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"alpha0=.* is not below beta0")
        beta0 = given["alpha0"] + given["offset"]
        strategy = BMCEpsilon(given["alpha0"], beta0, prior=prior)
    returns, rows = recorded_returns(given), []
    for start, stop in zip([0, *moments], moments, strict=False):
        strategy.update(returns[start:stop])
        names = ("alpha", "beta", "log_evidence")
        row = {name: getattr(strategy, name).clone() for name in names}
        rows.append(TensorDict({**row, "epsilon": strategy.eps.clone()}, []))
    return torch.stack(rows)


def assert_equal(found: TensorDict, expected: TensorDict) -> None:
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-12, msg=name)


@browser
@pytest.mark.parametrize("name", SETTINGS)
def test_the_page_computes_the_librarys_posterior(page: Page, name: str) -> None:
    given = PAPER | SETTINGS[name]
    changed(page, given)
    assert_equal(shown(page, MOMENTS), of_the_library(given, MOMENTS))


@browser
def test_keys_move_sliders_and_the_numbers_beside_them_are_what_is_computed(page: Page) -> None:
    changed(page, PAPER)
    given = dict(PAPER)
    for name in ("alpha0", "offset", "a0", "b0", "rewardScale"):
        page.evaluate(f"document.getElementById('bmc-{name}').focus()")
        for _ in range(5):
            page.press("ArrowRight")
        given[name] = page.evaluate(f"document.getElementById('bmc-{name}-number').valueAsNumber")
        assert given[name] > PAPER[name]
    assert_equal(shown(page, MOMENTS), of_the_library(given, MOMENTS))


@browser
def test_the_reset_button_goes_back_to_the_prior_of_the_recorded_run(page: Page) -> None:
    changed(page, PAPER | {"stream": "cart_sarsa", "alpha0": 3.0, "scaleFree": True, "a0": 7.0})
    page.evaluate("document.getElementById('bmc-reset').focus()")
    page.press("Space")
    given = PAPER | {"stream": "cart_sarsa", "alpha0": 10.0}
    assert_equal(shown(page, MOMENTS), of_the_library(given, MOMENTS))


@browser
def test_the_numbers_of_the_moment_are_those_of_the_posterior(page: Page) -> None:
    changed(page, PAPER)
    page.evaluate("document.getElementById('bmc-moment').focus()")
    page.press("Home")
    for _ in range(40):
        page.press("ArrowRight")
    numbers = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('[data-number]')]"
        ".map((cell) => [cell.dataset.number, cell.textContent.replace('−', '-')]))"
    )
    posterior = of_the_library(PAPER, [39, 40])
    assert numbers["moment"] == "40"
    for name in ("alpha", "beta", "epsilon"):
        assert float(numbers[name]) == pytest.approx(posterior[1][name].item(), rel=1e-4)
    returns = recorded_returns(PAPER)[39]
    gap = returns["greedy_return"] - returns["uniform_return"]
    assert float(numbers["gap"]) == pytest.approx(gap.item(), rel=1e-4)


@browser
@pytest.mark.parametrize(("alpha", "beta"), [(0.3, 2.5), (1.0, 1.01), (42.0, 60.0), (750.0, 9e3)])
def test_the_density_is_that_of_the_beta_distribution(
    page: Page, alpha: float, beta: float
) -> None:
    mean = alpha / (alpha + beta)
    points = [mean / 2, mean, (1 + mean) / 2]
    found = page.evaluate(f"{json.dumps(points)}.map(bmcUpdate.betaDensity({alpha}, {beta}))")
    exact = torch.tensor([alpha, beta, *points], dtype=torch.float64)
    expected = Beta(exact[0], exact[1]).log_prob(exact[2:]).exp()
    torch.testing.assert_close(
        torch.tensor(found, dtype=exact.dtype), expected, rtol=1e-9, atol=1e-300
    )


@browser
@pytest.mark.parametrize(
    ("field", "refused"), [("alpha0", "0"), ("alpha0", "-1"), ("offset", "-1"), ("b0", "")]
)
def test_a_number_that_is_no_prior_is_marked_and_changes_nothing(
    page: Page, field: str, refused: str
) -> None:
    changed(page, PAPER)
    before = shown(page, MOMENTS)
    number = f"document.getElementById('bmc-{field}-number')"
    page.evaluate(f"({CHANGE})({json.dumps({f'{field}-number': refused})})")
    assert page.evaluate(f"{number}.getAttribute('aria-invalid')") == "true"
    assert (shown(page, MOMENTS) == before).all()


@browser
def test_every_control_has_a_name_for_readers_of_screens(page: Page) -> None:
    controls = "[...document.querySelectorAll('#bmc-interactive :is(input, select)')]"
    unnamed = "(control) => !control.labels.length && !control.ariaLabel"
    assert page.evaluate(f"{controls}.length") > 10
    assert page.evaluate(f"{controls}.filter({unnamed}).map((control) => control.id)") == []


@browser
def test_a_phone_shows_it_without_scrolling_sideways(page: Page) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    page.call("Emulation.setDeviceMetricsOverride", **size)
    page.evaluate("new Promise((drawn) => setTimeout(drawn, 100))")
    widest = page.evaluate(
        "Math.max(...[...document.querySelectorAll('#bmc-interactive *')]"
        ".map((part) => part.getBoundingClientRect().right))"
    )
    page.call("Emulation.clearDeviceMetricsOverride")
    assert 300 < widest <= 390


@browser
def test_it_is_the_same_page_where_addresses_end_in_html(page: Page) -> None:
    here = page.evaluate("location.href")
    page.open(here.replace("interactive/index.html", "interactive.html"))
    assert_equal(shown(page, MOMENTS), of_the_library(PAPER, MOMENTS))
    page.open(here)


@pytest.mark.parametrize("experiment", record.TITLES)
def test_the_recording_is_the_beginning_of_a_run_of_the_library(experiment: str) -> None:
    stored, count = STREAMS[experiment], 200
    again = record.recorded(experiment, count)
    for name in ("title", "command", "prior", "perUnit"):
        assert again[name] == stored[name], name
    for name in ("greedyReturns", "uniformReturns"):
        assert again[name] == stored[name][:count], name
    ended = len(again["episodeEnds"])
    for name in ("episodeEnds", "terminalRewards"):
        assert again[name] == stored[name][:ended], name
    assert len(stored["greedyReturns"]) == len(stored["uniformReturns"]) == record.TRANSITIONS
