"""The three pictures of the start page: python scripts/site/pictures.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch.distributions import Beta, StudentT

from bmc_torchrl import functional as F  # noqa: N812
from bmc_torchrl.analysis.summaries import Results, read_results

ROOT = Path(__file__).parents[2]
STYLE = Path(__file__).with_name("site.mplstyle")


def models() -> Figure:
    """Two densities of the return, and the evidence of each at what ε-greedy expects."""
    values, epsilon = torch.tensor([3.2, 1.0, 0.4, -0.2]), torch.tensor(0.3)
    greedy, uniform = (model(torch.zeros(()), values, 0.95) for model in RETURNS)
    expected = F.mixture_return(greedy, uniform, epsilon)
    moments = F.Moments(torch.tensor(1000.0), torch.tensor(1.0), torch.tensor(500.0))
    a, b = F.precision_posterior(moments, mu0=0.0, tau0=1.0, a0=500.0, b0=500.0)
    grid = torch.linspace(-5, 6, 500)
    figure = Figure()
    axes = figure.subplots()
    for name, centre in (("uniform", uniform), ("greedy", greedy)):
        density = StudentT(2 * a, centre, (b / a).sqrt())
        (line,) = axes.plot(
            grid, density.log_prob(grid).exp(), label=f"“{name}”, around {centre:.2f}"
        )
        evidence = density.log_prob(expected).exp()
        axes.plot([expected, expected], [0, evidence], color=line.get_color(), linewidth=1)
        axes.plot(expected, evidence, "o", color=line.get_color())
        symbol = {"uniform": "$e^U$", "greedy": "$e^Q$"}[name]
        axes.annotate(
            f"{symbol} = {evidence:.2f}", (expected, evidence), (6, 4), textcoords="offset points"
        )
    axes.set(
        xlabel="return of the transition",
        ylabel="density",
        title=f"G = {expected:.2f}, expected at ε = {epsilon:.1f}, speaks for “greedy”",
    )
    axes.legend(loc="upper left")
    return figure


RETURNS = (F.greedy_return, F.uniform_return)
EPISODES = (0, 20, 40, 70, 140, 500)


def posterior(grid_world: Results) -> Figure:
    """Beta densities of ε as episodes go by, over log ε, which shows small ones."""
    assert grid_world.posterior is not None
    table = grid_world.posterior
    epsilon = torch.logspace(-4, -0.02, 500, dtype=torch.float64)
    figure = Figure()
    axes = figure.subplots()
    colours = mpl.colormaps["viridis"]
    for index, episode in enumerate(EPISODES):
        row = table.iloc[(table["episode"] - episode).abs().argmin()]
        density = Beta(row["alpha"], row["beta"]).log_prob(epsilon).exp() * epsilon
        label = f"{row['episode']:.0f}: ε = {row['alpha'] / (row['alpha'] + row['beta']):.3f}"
        axes.plot(
            epsilon, density, color=colours(0.3 + 0.65 * index / (len(EPISODES) - 1)), label=label
        )
    axes.set(
        xscale="log",
        xlabel="ε",
        ylabel="density of log ε",
        title="Posterior over ε, grid-world (α, β: means over 100 runs)",
    )
    axes.legend(title="after episode", loc="upper left")
    return figure


def epsilon_in_time(grid_world: Results) -> Figure:
    """ε and greedy tests of ε-BMC beside a schedule and a constant."""
    figure = Figure()
    left, right = figure.subplots(1, 2)
    for name in ("bmc", "geom_099", "fixed_01"):
        rows = grid_world.curves[grid_world.curves["strategy"] == name]
        label = grid_world.strategies[name].title
        left.plot(rows["episode"], rows["epsilon_mean"], label=label)
        right.plot(rows["episode"], rows["steps_mean"], label=label)
    left.set(xlabel="episode", ylabel="ε")
    left.legend()
    right.set(xlabel="episode", ylabel="steps of a greedy test", xlim=(0, 150))
    return figure


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    grid_world = read_results(ROOT / "results/grid_sarsa")
    with mpl.rc_context(fname=STYLE):
        made = {
            "models": models(),
            "posterior": posterior(grid_world),
            "epsilon": epsilon_in_time(grid_world),
        }
        for name, figure in made.items():
            figure.savefig(folder / f"start-{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
