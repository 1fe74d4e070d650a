"""The comparison gives known z scores for known shifts, and clear errors for broken files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bmc_torchrl.analysis.comparison import Comparison, compare, window_standard_error, z_score
from bmc_torchrl.analysis.published_workbooks import (
    BMC_MEANS,
    experiment_of,
    read_published,
)
from bmc_torchrl.analysis.scoring import PUBLISHED_BMC_RANKS
from bmc_torchrl.analysis.summaries import METRICS, read_results, write_results
from bmc_torchrl.analysis.tables import provenance, tidy
from bmc_torchrl.errors import ResultsError
from bmc_torchrl.experiments.compare import main

ROOT = Path(__file__).parents[2]
LABELS = ("bmc", "vdbe_005", "geom_09", "fixed_01", "power_15")
RUNS, EPISODES = 50, 150
Folder = Callable[..., Path]


def measurements(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Correlated performance and noisy ε, ``[strategies, runs, episodes]``."""
    generator = np.random.default_rng(seed)
    shape = (len(LABELS), RUNS, EPISODES)
    level = generator.normal(0, 5, (*shape[:2], 1))
    performance = 60 + level + generator.normal(0, 3, shape)
    epsilon = 0.3 + 0.02 * generator.normal(size=shape)
    epsilon[LABELS.index("fixed_01")] = 0.1
    return performance, epsilon


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    performance, epsilon = measurements()
    folder = tmp_path_factory.mktemp("results") / "grid_sarsa"
    table = tidy("grid_sarsa", LABELS, performance, -performance, epsilon)
    write_results(table, folder, provenance({}, 0, command=""))
    return folder


def workbook(
    path: Path,
    performance: np.ndarray,
    epsilon: np.ndarray,
    *,
    labels: tuple[str, ...] = LABELS,
    blank: bool = True,
) -> Path:
    """The authors' format: means and standard errors over runs; episode only on ``reward``."""
    count = performance.shape[1]
    sheets = {
        "reward": performance.mean(1),
        "reward_std": performance.std(1, ddof=1) / np.sqrt(count),
        "epsilon": epsilon.mean(1),
        "epsilon_std": epsilon.std(1, ddof=1) / np.sqrt(count),
    }
    with pd.ExcelWriter(path, engine="openpyxl") as writer:
        for name, values in sheets.items():
            columns = {f"{s}_{name}": v for s, v in zip(labels, values, strict=True)}
            sheet = pd.DataFrame(columns)
            if name == "reward":
                sheet.insert(0, "episode", np.arange(1, len(sheet) + 1))
            sheet.to_excel(writer, sheet_name=name, index=False)
            if blank:
                # As in the authors' cart-pole file, whose sheets reach beyond their data.
                writer.sheets[name].cell(row=900, column=40).number_format = "0.00"
    return path


def compared(folder: Path, path: Path) -> Comparison:
    return compare(read_results(folder), read_published(path))


def test_a_workbook_is_read_as_it_was_written(tmp_path: Path) -> None:
    performance, epsilon = measurements()
    table = read_published(workbook(tmp_path / "x.xlsx", performance, epsilon))
    assert list(table["strategy"].unique()) == list(LABELS)
    bmc = table[table["strategy"] == "bmc"]
    assert bmc["episode"].tolist() == list(range(1, EPISODES + 1))
    np.testing.assert_allclose(bmc["performance_mean"], performance[0].mean(0))
    np.testing.assert_allclose(bmc["epsilon_se"], epsilon[0].std(0, ddof=1) / np.sqrt(RUNS))
    assert (table[["performance_rounding", "epsilon_rounding"]] == 0).all(axis=None)


def test_our_own_data_as_published_have_z_zero(results: Path, tmp_path: Path) -> None:
    found = compared(results, workbook(tmp_path / "x.xlsx", *measurements()))
    assert len(found.table) == len(LABELS) * len(METRICS)
    np.testing.assert_allclose(found.table["z"], 0, atol=1e-4)
    assert found.agrees()
    np.testing.assert_allclose(
        found.table["ours_se"], found.table["published_se"], rtol=1e-4, atol=1e-9
    )


@pytest.mark.parametrize("z", [1.5, -3.0])
def test_a_known_shift_gives_the_known_z(results: Path, tmp_path: Path, z: float) -> None:
    performance, epsilon = measurements()
    error = performance.mean(-1).std(-1, ddof=1) / np.sqrt(RUNS)
    shift = z * np.sqrt(2) * error[:, None, None]
    found = compared(results, workbook(tmp_path / "x.xlsx", performance - shift, epsilon))
    auc = found.table[found.table["metric"] == "auc"]
    np.testing.assert_allclose(auc["z"], z, rtol=1e-3)
    medians = found.medians().set_index("metric")
    assert medians.loc["auc", "median"] == pytest.approx(abs(z), rel=1e-3)
    assert medians.loc["epsilon_10", "maximum"] == pytest.approx(0, abs=1e-4)
    assert found.agrees() == (abs(z) < 2)


def test_correlated_episodes_are_not_taken_for_independent(results: Path, tmp_path: Path) -> None:
    found = compared(results, workbook(tmp_path / "x.xlsx", *measurements(seed=1)))
    auc = found.table[found.table["metric"] == "auc"]
    independent = np.hypot(5, 3) / np.sqrt(RUNS * EPISODES)
    assert (auc["published_se"] > 4 * independent).all()
    assert (auc["z"].abs() < 4).all()


def test_z_is_standard_normal_for_a_faithful_reproduction(results: Path, tmp_path: Path) -> None:
    found = compared(results, workbook(tmp_path / "x.xlsx", *measurements(seed=2)))
    assert found.agrees()
    assert 0.2 < found.medians().set_index("metric").loc["all", "median"] < 1.6


def test_the_published_error_of_a_window_has_our_correlation() -> None:
    ones = np.ones(4)
    assert window_standard_error(3 * ones, ones, our_window_error=1.0) == 3
    assert window_standard_error(3 * ones, ones, our_window_error=0.5) == 1.5
    assert window_standard_error(3 * ones, 0 * ones, our_window_error=0.0) == 3
    assert window_standard_error(0 * ones, 0 * ones, our_window_error=0.0) == 0


@pytest.mark.parametrize(
    ("ours", "published", "expected"),
    [
        ((22.0, 0.0), (21.9999866, 0.0), (0.0, False)),
        ((0.5, 0.0), (0.4999, 0.0), (0.0, False)),
        ((0.0, 0.0), (3e-36, 0.0), (0.0, False)),
        ((0.45, 0.0), (0.4500006, 4e-9), (0.0, False)),
        ((0.0, 0.0), (0.0, 0.0), (0.0, False)),
        ((22.0, 0.0), (22.02, 0.02), (-1.0, True)),
    ],
)
def test_values_without_error_are_equal_within_rounding(ours, published, expected) -> None:
    z, informative = z_score(*ours, *published)
    assert (pytest.approx(z, abs=1e-4), informative) == expected


def test_values_without_error_that_differ_have_a_large_finite_z() -> None:
    z, informative = z_score(0.02, 0.0, 0.01, 0.0)
    assert informative
    assert 100 < z < np.inf


@pytest.mark.parametrize(
    ("ours", "published", "expected"),
    [
        # Without errors, values are equal up to 0.1 % of the published one.
        ((1.0009, 0.0), (1.0, 0.0), (0.0, False)),
        ((1.0011, 0.0), (1.0, 0.0), (1.1, True)),
        ((-0.9989, 0.0), (-1.0, 0.0), (1.1, True)),
        # Errors up to 2e-6 of the published value are those of its arithmetic.
        ((1.0, 1.9e-6), (1.0001, 0.0), (0.0, False)),
        ((1.0, 2.1e-6), (1.0001, 0.0), (-1e-4 / np.hypot(2.1e-6, 2.0002e-6), True)),
        # Near zero, differences and errors up to 1e-6 are none.
        ((1e-8, 1e-8), (3e-8, 1e-8), (0.0, False)),
        ((1e-6, 1e-6), (0.0, 0.0), (0.0, False)),
        ((1e-3, 5e-7), (0.0, 0.0), (2000.0, True)),
        ((3e-6, 0.0), (0.0, 0.0), (3.0, True)),
    ],
)
def test_each_tolerance_is_what_it_says(ours, published, expected) -> None:
    z, informative = z_score(*ours, *published)
    assert (pytest.approx(z, rel=1e-6), informative) == expected


def test_an_error_within_the_rounding_says_nothing() -> None:
    assert z_score(0.49, 0.0005, 0.49, 0.0, rounding=0.0005) == (0.0, False)
    assert z_score(0.49, 0.0006, 0.49, 0.0, rounding=0.0005) == (0.0, True)
    assert z_score(0.4905, 0.0, 0.49, 0.0, rounding=0.0005) == (0.0, False)
    z, informative = z_score(0.492, 0.0004, 0.49, 0.0, rounding=0.0005)
    assert (pytest.approx(z, rel=1e-5), informative) == (0.0015 / 0.0004, True)


def test_errors_of_ours_up_to_a_millionth_are_none() -> None:
    ones = np.ones(4)
    assert window_standard_error(3 * ones, 1e-6 * ones, our_window_error=5e-7) == 3
    assert window_standard_error(3 * ones, 2e-6 * ones, our_window_error=1e-6) == pytest.approx(1.5)
    assert window_standard_error(3 * ones, ones, our_window_error=2.0) == 3


def test_deterministic_values_are_left_out_of_medians(results: Path, tmp_path: Path) -> None:
    found = compared(results, workbook(tmp_path / "x.xlsx", *measurements(seed=1)))
    constant = found.table.query("strategy == 'fixed_01' and metric == 'epsilon_10'").iloc[0]
    assert (constant["z"], constant["informative"]) == (0, False)
    assert found.medians().set_index("metric").loc["epsilon_10", "pairs"] == len(LABELS) - 1


def test_means_printed_with_three_digits_are_compared_to_half_a_digit(tmp_path: Path) -> None:
    path = workbook(tmp_path / "x.xlsx", *measurements())
    edited(path, "epsilon", lambda t: t.mul(t.index + 1, axis=0).map(lambda x: float(f"{x:.3g}")))
    table = read_published(path).groupby("strategy")
    assert table["epsilon_rounding"].first()["bmc"] == pytest.approx(0.0005)
    assert table["epsilon_rounding"].last()["bmc"] == pytest.approx(0.05)
    assert (table["performance_rounding"].max() == 0).all()
    assert z_score(0.4903, 1e-5, 0.49, 1e-5, rounding=0.0005) == (0.0, False)
    assert z_score(0.492, 1e-3, 0.49, 1e-9, rounding=0.001)[0] == pytest.approx(1.0)


def test_shorter_results_are_compared_on_their_own_episodes(tmp_path: Path) -> None:
    performance, epsilon = measurements()
    short = tidy(
        "grid_sarsa", LABELS, performance[..., :80], performance[..., :80], epsilon[..., :80]
    )
    write_results(short, tmp_path / "grid_sarsa", provenance({}, 0, command=""))
    found = compared(tmp_path / "grid_sarsa", workbook(tmp_path / "x.xlsx", performance, epsilon))
    np.testing.assert_allclose(found.table["z"], 0, atol=1e-4)
    assert any("cut to our 80 episodes" in note for note in found.notes)


def test_supply_chain_is_compared_by_return(tmp_path: Path) -> None:
    performance, epsilon = measurements()
    table = tidy("supply_dqn", LABELS, 0 * performance + 200, performance, epsilon)
    write_results(table, tmp_path / "supply_dqn", provenance({}, 0, command=""))
    found = compared(tmp_path / "supply_dqn", workbook(tmp_path / "x.xlsx", performance, epsilon))
    np.testing.assert_allclose(found.table["z"], 0, atol=1e-4)


def test_strategies_on_one_side_only_are_named(results: Path, tmp_path: Path) -> None:
    performance, epsilon = measurements()
    labels = ("bmc", "vdbe_005", "geom_09", "fixed_01", "geom_085")
    found = compared(results, workbook(tmp_path / "x.xlsx", performance, epsilon, labels=labels))
    assert found.notes == ("published but not run: geom_085", "run but not published: power_15")


def test_what_cannot_be_compared_is_a_clear_error(results: Path, tmp_path: Path) -> None:
    performance, epsilon = measurements()
    strange = workbook(tmp_path / "a.xlsx", performance, epsilon, labels=tuple("vwxyz"))
    with pytest.raises(ResultsError, match="no strategy in common"):
        compared(results, strange)
    short = workbook(tmp_path / "b.xlsx", performance[..., :99], epsilon[..., :99])
    with pytest.raises(ResultsError, match="only 99 are published"):
        compared(results, short)
    single = tidy("grid_sarsa", LABELS, performance[:, :1], performance[:, :1], epsilon[:, :1])
    write_results(single, tmp_path / "grid_sarsa", provenance({}, 0, command=""))
    with pytest.raises(ResultsError, match="single run"):
        compared(tmp_path / "grid_sarsa", workbook(tmp_path / "c.xlsx", performance, epsilon))


@pytest.mark.parametrize("keep", [0.0, 0.4, 0.95])
def test_a_truncated_workbook_is_a_clear_error(tmp_path: Path, keep: float) -> None:
    path = workbook(tmp_path / "x.xlsx", *measurements())
    content = path.read_bytes()[: int(path.stat().st_size * keep)]
    path.write_bytes(content)
    with pytest.raises(ResultsError, match=r"x\.xlsx is not a readable Excel workbook"):
        read_published(path)
    assert path.read_bytes() == content


def test_a_flipped_byte_in_a_workbook_is_a_clear_error(tmp_path: Path) -> None:
    path = workbook(tmp_path / "x.xlsx", *measurements())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ResultsError, match=r"x\.xlsx"):
        read_published(path)


def edited(path: Path, sheet: str, edit: Callable[[pd.DataFrame], pd.DataFrame | None]) -> Path:
    sheets = pd.read_excel(path, sheet_name=None)
    changed = edit(sheets.pop(sheet))
    with pd.ExcelWriter(path) as writer:
        for name, content in sheets.items():
            content.to_excel(writer, sheet_name=name, index=False)
        if changed is not None:
            changed.to_excel(writer, sheet_name=sheet, index=False)
    return path


@pytest.mark.parametrize(
    ("sheet", "edit", "message"),
    [
        ("epsilon", lambda t: None, "lacks the sheets \\['epsilon'\\]"),
        ("reward_std", lambda t: t.drop(columns="bmc_reward_std"), "'bmc_reward_std'"),
        ("reward", lambda t: t[["episode"]], "no column such as bmc_reward"),
        ("reward", lambda t: t.astype(object).replace(t.iloc[3, 1], "oops"), "in row 5"),
        ("epsilon", lambda t: t.where(t.index.to_series() != 7), "no number in row 9"),
    ],
)
def test_a_workbook_in_another_format_is_a_clear_error(
    tmp_path: Path, sheet, edit, message
) -> None:
    path = edited(workbook(tmp_path / "x.xlsx", *measurements(), blank=False), sheet, edit)
    with pytest.raises(ResultsError, match=message):
        read_published(path)


def test_columns_of_different_lengths_are_cut_with_a_warning(tmp_path: Path) -> None:
    path = workbook(tmp_path / "x.xlsx", *measurements(), blank=False)
    edited(path, "epsilon", lambda t: t.head(100))
    with pytest.warns(UserWarning, match="only the first 100 episodes"):
        table = read_published(path)
    assert table["episode"].max() == 100


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run ``bmc compare`` with arguments; returns its exit status, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
        return (main(), *capsys.readouterr())

    return call


def test_the_script_exits_with_its_verdict(run, results: Path, tmp_path: Path) -> None:
    performance, epsilon = measurements()
    same = workbook(tmp_path / "same.xlsx", performance, epsilon)
    shifted = workbook(tmp_path / "shifted.xlsx", performance + 9, epsilon)
    broken = tmp_path / "broken.xlsx"
    broken.write_bytes(same.read_bytes()[:500])
    before = sorted((p.name, p.read_bytes()) for p in results.iterdir())

    status, output, _ = run(results, same)
    assert status == 0
    assert "agrees with the published data" in output
    assert all(label in output for label in LABELS)
    assert "…" not in output

    status, output, _ = run(results, shifted, "--csv", tmp_path / "z.csv")
    assert status == 1
    assert "DISAGREES" in output
    assert (pd.read_csv(tmp_path / "z.csv").query("metric == 'auc'")["z"] < -2).all()
    status, _, errors = run(results, shifted, "--csv", tmp_path / "z.csv")
    assert status == 2
    assert "exists already" in errors

    status, *_ = run(results, same, "--record")
    kept = read_results(results).comparison
    assert kept is not None
    assert kept.columns.tolist() == ["strategy", "metric", "z", "informative"]
    assert (kept["z"].abs() < 0.01).all()
    (results / "comparison.csv").unlink()

    status, _, errors = run(results, broken)
    assert status == 2
    assert "broken.xlsx is not a readable Excel workbook" in errors
    assert before == sorted((p.name, p.read_bytes()) for p in results.iterdir())


def test_without_a_pair_that_says_anything_nothing_is_judged(run, tmp_path: Path) -> None:
    performance, epsilon = (np.full((len(LABELS), RUNS, EPISODES), x) for x in (22.0, 0.1))
    table = tidy("grid_sarsa", LABELS, performance, -performance, epsilon)
    folder = tmp_path / "grid_sarsa"
    write_results(table, folder, provenance({}, 0, command=""))
    path = workbook(tmp_path / "x.xlsx", performance, epsilon)
    found = compared(folder, path)
    assert (found.medians()["pairs"] == 0).all()
    assert found.medians()[["median", "maximum"]].isna().all(axis=None)
    assert not found.judged
    assert not found.agrees()
    status, output, _ = run(folder, path)
    assert status == 2
    assert output.count("not judged") == len(METRICS) + 2
    assert "agrees" not in output


def test_a_metric_without_pairs_is_not_judged_and_the_others_are(run, tmp_path: Path) -> None:
    performance, epsilon = measurements()
    epsilon[:] = 0.1
    table = tidy("grid_sarsa", LABELS, performance, -performance, epsilon)
    write_results(table, tmp_path / "grid_sarsa", provenance({}, 0, command=""))
    path = workbook(tmp_path / "x.xlsx", performance, epsilon)
    status, output, _ = run(tmp_path / "grid_sarsa", path)
    assert (status, output.count("not judged")) == (0, 3)
    assert compared(tmp_path / "grid_sarsa", path).judged


def test_a_workbook_of_another_experiment_is_known_by_its_name(run, results, tmp_path) -> None:
    path = workbook(tmp_path / "cart_dqn.xlsx", *measurements())
    status, _, errors = run(results, path)
    assert status == 2
    assert "called as the workbook of cart_dqn, the results are of grid_sarsa" in errors


@pytest.mark.parametrize("name", [name for name in BMC_MEANS if name != "grid_sarsa"])
def test_a_workbook_of_another_experiment_is_known_by_its_numbers(results, tmp_path, name) -> None:
    performance, epsilon = measurements()
    shift = performance[0].mean() - BMC_MEANS[name]
    path = workbook(tmp_path / "x.xlsx", performance - shift, epsilon)
    message = f"the authors' {name}, the results are of grid_sarsa: compare with grid_sarsa.xlsx"
    with pytest.raises(ResultsError, match=message):
        compared(results, path)
    shifted = workbook(tmp_path / "y.xlsx", performance - shift + 0.001, epsilon)
    assert experiment_of(read_published(shifted)) is None


# docs/protocol.md §6 says why the sixth, supply-chain DQN, is not among them.
PUBLISHED_EPISODES = {
    "grid_sarsa": 500,
    "grid_dqn": 500,
    "cart_sarsa": 500,
    "cart_dqn": 300,
    "supply_sarsa": 1000,
}


@pytest.mark.parametrize("name", PUBLISHED_EPISODES)
def test_the_authors_files_are_read(published: Path, name: str) -> None:
    table = read_published(published / f"{name}.xlsx")
    assert table["strategy"].nunique() == 22
    assert table.groupby("strategy").size().unique().tolist() == [PUBLISHED_EPISODES[name]]
    assert experiment_of(table) == name
    auc = table.groupby("strategy")["performance_mean"].mean()
    assert auc.rank(ascending=name.startswith("grid"))["bmc"] == PUBLISHED_BMC_RANKS[name]


@pytest.mark.parametrize("name", PUBLISHED_EPISODES)
def test_our_results_agree_with_the_published_data(published: Path, name: str) -> None:
    found = compared(ROOT / "results" / name, published / f"{name}.xlsx")
    assert not found.notes
    assert (found.table.groupby("metric").size() == 22).all()
    assert found.medians()["median"].max() < 2
