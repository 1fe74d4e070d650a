"""Figures show what they are given, are labelled, and no text lies on other text."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from bmc_torchrl.analysis.plots import (
    best_of_families,
    learning_figure,
    posterior_figure,
    profile_figure,
    save_figure,
    sensitivity_figure,
)
from bmc_torchrl.analysis.scoring import EXPERIMENTS, measure
from bmc_torchrl.analysis.summaries import curves, scores, write_results
from bmc_torchrl.analysis.tables import provenance, tidy
from bmc_torchrl.analysis.titles import Strategies
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments.figures import main

ROOT = Path(__file__).parents[2]
SWEEP = yaml.safe_load((ROOT / "configs/sweep/paper.yaml").read_text())["strategies"]
NAMED = Strategies.of_entries(SWEEP)
LABELS = tuple(NAMED)
FLOOR = {
    "domain": {"env": {"network": {"truck_cost": "floor"}}},
    "settings": {"by_family": {"power": {"truck_cost": "ceil"}}},
}
TWO_RULES = Strategies.of_metadata({"strategies": SWEEP, "config": FLOOR})


def table(experiment: str = "grid_sarsa", labels=LABELS, runs: int = 5) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    shape, episode = (len(labels), runs, 60), np.arange(60)
    pace = np.linspace(5, 30, len(labels))[:, None, None]
    steps = 22 + 178 * np.exp(-episode / pace) + generator.normal(0, 3, shape)
    epsilon = 0.5 * np.exp(-episode / pace) + 0.01 * generator.random(shape)
    return tidy(experiment, labels, steps, -steps / 10, epsilon)


def published(content: pd.DataFrame) -> pd.DataFrame:
    found = curves(content)
    return pd.DataFrame(
        {
            "strategy": found["strategy"],
            "episode": found["episode"],
            "performance_mean": found["steps_mean"] + 5,
            "epsilon_mean": found["epsilon_mean"],
        }
    )


def sensitivity() -> pd.DataFrame:
    rows = [("alpha0", x, 50 + x**0.5, 0.5, None) for x in (0.1, 1, 10, 100)]
    for variant in ("b₀ = 500", "b₀ from the returns"):
        rows += [("reward_scale", x, 50.0, 0.5, variant) for x in (0.01, 1, 100)]
    return pd.DataFrame(rows, columns=["parameter", "value", "auc", "auc_se", "variant"])


def texts(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes intersect; tick labels outside their axis are not drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    undrawn = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                if not low <= tick.get_loc() <= high:
                    undrawn |= {tick.label1, tick.label2}
    boxes = [
        (text.get_text(), text.get_window_extent(renderer))
        for text in texts(figure)
        if text not in undrawn
    ]
    width, height = canvas.get_width_height()
    outside = [
        (name, "edge")
        for name, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    return outside + [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes, 2)
        if a.padded(-0.5).overlaps(b.padded(-0.5))
    ]


def figures() -> dict[str, Figure]:
    content, few = table(), table("supply_dqn", ("bmc", "fixed_01", "vdbe_001"))
    episode = np.arange(1, 40)
    return {
        "learning": learning_figure("grid_sarsa", curves(content), NAMED),
        "overlay": learning_figure(
            "grid_sarsa", curves(content), NAMED, published=published(content)
        ),
        "few": learning_figure("supply_dqn", curves(few), NAMED, note="reduced: 5 of 100 runs"),
        "two rules": learning_figure("supply_dqn", curves(table("supply_dqn")), TWO_RULES),
        "profile": profile_figure("grid_sarsa", scores(content), NAMED),
        "sensitivity": sensitivity_figure("grid_sarsa", sensitivity()),
        "posterior": posterior_figure(1 + episode / 9, 1.01 + episode),
    }


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    return figures()


NAMES = ("learning", "overlay", "few", "two rules", "profile", "sensitivity", "posterior")


@pytest.mark.parametrize("name", NAMES)
def test_no_text_lies_on_other_text_or_beyond_the_edge(drawn, name: str) -> None:
    assert overlaps(drawn[name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_is_labelled_and_readable(drawn, name: str) -> None:
    panels = [axes for axes in drawn[name].axes if axes.get_label() != "<colorbar>"]
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    assert all(axes.get_legend() is not None for axes in panels)
    assert min(text.get_fontsize() for text in texts(drawn[name])) >= 6
    plain = [text for axes in panels for text in axes.get_legend().get_texts()]
    assert min(text.get_fontsize() for text in plain) >= 9


def test_the_six_panels_show_every_strategy(drawn) -> None:
    panels = drawn["learning"].axes
    assert len(panels) == 6
    shown = [{line.get_label() for line in axes.lines} for axes in panels]
    for members, family in zip(shown[:4], ("constant", "geometric", "power", "vdbe"), strict=True):
        expected = {s.short_title for s in NAMED.values() if s.family == family}
        assert members == expected | {"ε-BMC", "optimum"}
    sigmas = [line.get_label() for line in panels[3].lines if "σ" in line.get_label()]
    assert sigmas == [f"σ = {value}" for value in ("0.01", "0.05", "0.1", "0.5", "1", "10", "100")]
    assert len(shown[4]) == 6
    assert len(shown[5]) == 5
    assert panels[5].get_ylabel() == "ε"


def test_the_mean_is_drawn_within_its_standard_error(drawn) -> None:
    found = curves(table()).query("strategy == 'bmc'")
    axes = drawn["learning"].axes[0]
    line = next(line for line in axes.lines if line.get_label() == "ε-BMC")
    np.testing.assert_allclose(line.get_ydata(), found["steps_mean"])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    expected = (found["steps_mean"] + found["steps_se"]).max()
    assert band.max() == pytest.approx(expected)


def test_published_curves_are_dashed(drawn) -> None:
    plain, overlay = drawn["learning"].axes[0], drawn["overlay"].axes[0]
    assert len(overlay.lines) == len(plain.lines) + 6
    assert all(line.is_dashed() for line in overlay.lines[len(plain.lines) :])
    assert "published" in drawn["overlay"].get_suptitle()


def test_each_truck_cost_rule_has_its_optimum(drawn) -> None:
    panels = drawn["two rules"].axes[:5]
    optima = [
        {line.get_label(): line.get_ydata()[0] for line in axes.lines if "opt" in line.get_label()}
        for axes in panels
    ]
    assert [found.pop("optimum") for found in optima] == [14.95] * 5
    assert optima == [{}, {}, {"optimum, every truck paid": 13.57}, {}, {}]


def test_a_reduction_is_in_the_title(drawn) -> None:
    assert "reduced: 5 of 100 runs" in drawn["few"].get_suptitle()
    assert "reduced" not in drawn["learning"].get_suptitle()


def test_a_family_that_was_not_run_is_said_to_be_missing(drawn) -> None:
    said = [text.get_text() for axes in drawn["few"].axes for text in axes.texts]
    assert said == ["not run", "not run"]


def test_the_best_of_a_family_follows_the_measure() -> None:
    auc = pd.Series({"bmc": 1.0, "geom_09": 5.0, "geom_095": 3.0, "mine": 4.0})
    assert best_of_families(auc, measure("grid_dqn"), NAMED) == ["geom_095", "mine"]
    assert best_of_families(auc, measure("cart_dqn"), NAMED) == ["geom_09", "mine"]


def test_a_strategy_of_a_new_family_is_drawn_without_new_code() -> None:
    content = curves(table("cart_sarsa", (*LABELS, "mine_fast")))
    panel = learning_figure("cart_sarsa", content, NAMED).axes[4]
    assert "mine_fast" in {line.get_label() for line in panel.lines}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_titled(experiment: str) -> None:
    content = curves(table(experiment, ("bmc", "geom_09"), runs=1))
    figure = learning_figure(experiment, content, NAMED)
    assert measure(experiment).domain in figure.get_suptitle()
    assert figure.axes[0].get_ylabel() == measure(experiment).label


def test_colours_can_be_told_apart_without_red_and_green(drawn) -> None:
    colours = [line.get_color() for line in drawn["learning"].axes[3].lines]
    assert len({colour for colour in colours if isinstance(colour, str)}) == 8


def test_a_profile_falls_as_the_threshold_gets_harder(drawn) -> None:
    axes = drawn["profile"].axes[0]
    assert axes.xaxis_inverted()
    for line in axes.lines:
        assert (np.diff(np.asarray(line.get_ydata())) >= 0).all()


def test_the_posterior_figure_shows_the_mean(drawn) -> None:
    episode = np.arange(1, 40)
    line = drawn["posterior"].axes[0].lines[0]
    alpha, beta = 1 + episode / 9, 1.01 + episode
    np.testing.assert_allclose(line.get_ydata(), alpha / (alpha + beta))


def test_unusable_tables_are_clear_errors() -> None:
    with pytest.raises(ResultsError, match="same number"):
        posterior_figure([1.0, 2.0], [1.0])
    with pytest.raises(ResultsError, match="lacks"):
        sensitivity_figure("grid_sarsa", pd.DataFrame({"parameter": ["alpha0"]}))


@pytest.mark.parametrize("name", ["profile", "sensitivity", "posterior"])
def test_saved_figures_are_not_empty(drawn, tmp_path: Path, name: str) -> None:
    path = save_figure(drawn[name], tmp_path / name)
    assert path == tmp_path / f"{name}.png"
    pixels = imread(path)[..., :3]
    assert pixels.shape[1] > 1000
    assert 0.01 < (pixels.min(axis=-1) < 0.9).mean() < 0.6


def test_the_same_figure_gives_the_same_file(tmp_path: Path) -> None:
    one, two = (
        save_figure(posterior_figure([1.0, 2.0], [1.0, 9.0]), tmp_path / name)
        for name in ("one", "two")
    )
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
def test_the_script_draws_everything_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "grid_sarsa"
    write_results(table(labels=("bmc", "fixed_01")), folder, provenance({}, 0, command=""))
    sensitivity().to_csv(folder / "sensitivity.csv", index=False)
    posterior = pd.DataFrame({"episode": [1, 2], "alpha": [1, 2], "beta": [1, 9]})
    posterior.to_csv(folder / "posterior.csv", index=False)
    arguments = ["figures.py", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main() == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"grid_sarsa{part}.png" for part in ("", "_profiles", "_sensitivity", "_posterior")
    }
    capsys.readouterr()
    (folder / "curves.csv").write_text("strategy,epi")
    assert main() == 2
    assert "curves.csv" in capsys.readouterr().err
    (folder / "curves.csv").unlink()
    assert main() == 2
    assert "holds no curves.csv" in capsys.readouterr().err
