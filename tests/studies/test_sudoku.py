"""The study of Sudoku: times of another density, rows from training to results, its time budget, and its page."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.eval.results import read_rows
from cdlm.methods import METHODS
from cdlm.process import masked
from cdlm.rng import seeded
from studies import sudoku, sudoku_page
from studies.sudoku import DONE, DensityTimes, Row, adaptive_quantiles, bell_quantiles, parse, run_all, run_row

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "results" / "sudoku"


@pytest.fixture(autouse=True)
def _methods() -> Iterator[None]:
    """The table of methods as it was, after each test."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.parametrize("edges", [bell_quantiles(), adaptive_quantiles()], ids=["bell", "adaptive"])
def test_times_have_the_density_that_weights_undo(edges: tuple[float, ...]) -> None:
    """E[f(t) / density(t)] is the integral of f, and half of the times lie below the median."""
    times, n = DensityTimes(edges), 20_000
    assert list(edges) == sorted(set(edges))
    assert (edges[0], edges[-1]) == (0, 1)
    s, t = times(0.0, torch.arange(n), n, seeded(0, batch=n))
    pair = masked(4)
    assert bool((s == 0).all())
    assert float((t < edges[len(edges) // 2]).double().mean()) == pytest.approx(0.5, abs=0.01)
    term = sudoku.at_times(pair, 10, edges).terms[0]
    x0 = torch.zeros(n, 1, dtype=torch.long)
    weight = term.weight(term.coupling(x0, s, t, seeded(1, batch=n)))
    assert float(weight.max()) <= 1 / sudoku.UNIFORM_SHARE + 1e-9
    for power in (0, 1, 3):
        assert float((weight * t**power).mean()) == pytest.approx(1 / (power + 1), abs=0.005)


def test_the_middle_is_more_likely_in_a_bell() -> None:
    edges = torch.tensor(bell_quantiles())
    assert edges.tolist() == pytest.approx((1 - edges).flip(0).tolist(), abs=1e-6)
    assert float(edges[len(edges) // 4]) > 0.25


def test_all_methods_of_the_table_are_rows() -> None:
    rows = sudoku.study_rows(4)
    wanted = set(METHODS) - {"mcdlm-guided", "few-step", "joint"}
    assert {row.method for row in rows.values() if row.seed} == wanted
    assert len(wanted) == 9
    assert [row.seed for row in rows.values()] == sorted(row.seed for row in rows.values())
    assert {row.method for row in sudoku.study_rows(6).values() if row.seed} == {"mdlm", "mcdlm"}


@pytest.mark.parametrize("method", ["sdtt", pytest.param("mdlm-bell", marks=pytest.mark.soak)])
def test_a_row_from_training_to_results(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sudoku, "STEPS", {4: (2,)})
    monkeypatch.setattr(sudoku, "CONTROLS", {name: sudoku.CONTROLS[name] for name in ("greedy", "grid order")})
    prepare(PrepareConfig((), tmp_path / "w" / "data-4", source="sudoku-4"))
    small = ["--steps", "3", "--num-samples", "8", "--likelihood-samples", "1", "--device", "cpu"]
    options = parse([*small, "--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "w")])
    run_row(Row(4, method), options)
    folder = tmp_path / "out" / f"4-{method}"
    assert json.loads((folder / DONE).read_text())["steps"] == 3
    rows = read_rows(folder)
    assert [row["num_samples"] for row in rows] == [8, 2, 2]
    assert {row["model"] for row in rows} == {method}
    cells = sudoku_page.cells_of(tmp_path / "out", 4)
    assert {sampler for _, sampler, _ in cells} == {"plain", "greedy", "grid order"}
    training = json.loads((folder / "run.json").read_text())
    if method == "sdtt":
        assert (training["method"], training["steps"]) == ("sdtt:smallest=0.03125", 1)
        assert training["init_from"].endswith("4-sdtt/mdlm-2")


def test_processes_end_with_the_time_and_finished_rows_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "w"), "--rows", "4-exact"]
    small = ["--num-samples", "4", "--likelihood-samples", "1", "--jobs", "2"]
    row = Row(4, "exact")
    assert not run_all([row], parse([*common, *small, "--minutes", "0.005"]))
    assert "not finished: 4-exact" in capsys.readouterr().out
    run_row(row, parse([*common, *small]))
    assert len(read_rows(tmp_path / "out" / "4-exact")) == 20
    assert run_all([row], parse([*common, *small]))
    assert "1 of 1 rows are finished" in capsys.readouterr().out


def test_unknown_rows_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--rows", "4-mdml"])
    assert "unknown row '4-mdml'; choose from 4-exact, 4-ar" in capsys.readouterr().err


def test_the_references_are_the_known_ones() -> None:
    """Valid grids by independent code, and one cell at a time without any loss: log 288 nats."""
    cells = sudoku_page.cells_of(RESULTS, 4)
    known = {
        "plain": (0, 0.015, 0.14, 0.37, 0.61),
        "equal steps": (0, 0.004, 0.20, 0.58, 1),
        "grid order": (0, 0.003, 0.50, 0.77, 1),
        "most certain first": (0, 0.003, 0.15, 0.44, 1),
    }
    for sampler, shares in known.items():
        rows = [cells["exact", sampler, steps][0] for steps in (1, 2, 4, 8, 16)]
        assert [row["valid"] for row in rows] == pytest.approx(shares, abs=0.025)
        assert rows[0]["nats"] == pytest.approx(16 * math.log(4))
        if sampler != "plain":
            assert rows[-1]["nats"] == pytest.approx(math.log(288))


def test_the_page_shows_the_finished_rows(tmp_path: Path) -> None:
    sudoku.register()
    page = (ROOT / "docs" / "sudoku.md").read_text()
    assert sudoku_page.fill_page(page, RESULTS) == page, (
        "docs/sudoku.md is out of date: python -m studies.sudoku --page"
    )
    assert json.loads(sudoku_page.DEMO_ROWS.read_text()) == sudoku_page.demo_rows(RESULTS)
    shutil.copytree(RESULTS / "4-exact", tmp_path / "4-exact")
    exact = (tmp_path / "4-exact" / "results.jsonl").read_text()
    for seed in (0, 1, 2):  # rows of a method, made up, to see that seeds are averaged
        folder = tmp_path / f"4-mdlm-{seed}"
        folder.mkdir()
        (folder / DONE).write_text("{}")
        line = json.loads(exact.splitlines()[0]) | {"model": "mdlm", "seed": seed, "valid": 0.2 + 0.1 * seed}
        (folder / "results.jsonl").write_text(json.dumps(line) + "\n")
    table = sudoku_page.methods_table(tmp_path, 4, "valid")
    assert "| MDLM | 3 | 0.300 [0.052, 0.548] |" in table  # Student's interval of 0.2, 0.3, 0.4
    (tmp_path / "4-mdlm-2" / DONE).unlink()
    assert "| MDLM | 2 |" in sudoku_page.methods_table(tmp_path, 4, "valid")
    assert "No results yet." in sudoku_page.controls_table(tmp_path / "none", 4)
    sudoku_page.plot_methods(tmp_path, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
