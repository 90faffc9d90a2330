"""A whole report, from rows to files; and what it says when it cannot be made."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from cdlm.eval.config import ReportConfig
from cdlm.eval.report.write import write_report

from .rows import row, sweep

QUIET = Console(quiet=True)


def folder(tmp_path: Path, rows: list[dict], name: str = "results") -> Path:  # type: ignore[type-arg]
    out = tmp_path / name
    out.mkdir(exist_ok=True)
    (out / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return out


def test_a_report_has_every_table_and_figure_that_its_rows_allow(tmp_path: Path) -> None:
    rows = [cell for n in (8, 32) for cell in sweep("MDLM", n)]
    rows += [cell for n in (8, 32) for cell in sweep("MCDLM", n, gain=0.8, method="mcdlm")]
    rows += [row("UCDLM", n, 200.0, process="uniform", method="ucdlm", final_step="argmax") for n in (8, 32)]
    rows += [row("AR", None, 150.0, 5.4, process="none", method="ar")]
    rows += [row("MDLM", n, 90.0, precision="naive-fp32") for n in (8, 32)]
    nelbo = {
        "nelbo": 3.0,
        "nelbo_interval": [2.9, 3.1],
        "nelbo_ppl": 20.1,
        "likelihood_samples": 16,
        "exact": False,
        "dataset": "ptb",
    }
    likelihood = {key: value for key, value in row("MDLM", key="l").items() if not key.startswith("ppl")}
    rows.append({**likelihood, "task": "likelihood", **nelbo})
    curve = {"count": [500, 500], "before": [0.1, 0.5], "after": [0.2, 0.4]}
    pairs = [{"t": 0.5, "s": 0.25, "reliability": curve, "reliability_error": 0.1}]
    pairs[0] |= {"own_chain_tv": 0.02, "own_chain_floor": 0.01}
    rows.append({**likelihood, "task": "consistency", "key": "c", "dataset": "ptb", "pairs": pairs})
    path = write_report(ReportConfig((folder(tmp_path, rows),), tmp_path / "report", "paper"), QUIET)
    page = path.read_text()
    for part in ("Table 1.", "Table 2.", "Table 7.", "UCDLM (greedy)", "At matched entropy", "Frontier against"):
        assert part in page
    for part in ("Steps needed to match", "Likelihood", "20.10 [18.17, 22.20]", "Path invariance", "*682.7 (5.9)*"):
        assert part in page
    for line in page.splitlines():
        if line.startswith("!["):
            picture = tmp_path / "report" / line.split("(")[-1].rstrip(")")
            assert picture.read_bytes()[:4] == b"\x89PNG"
    names = {file.suffix for file in (tmp_path / "report" / "tables").iterdir()}
    assert names == {".md", ".tex", ".png"}
    data = json.loads((tmp_path / "report" / "report.json").read_text())
    better = [m for m in data["matched"] if m["name"] == "MCDLM"]
    assert [m["ratio"]["value"] for m in better] == pytest.approx([0.8, 0.8])
    assert "| 8 | MCDLM | plain | 5.50 | 320.0 | 400.0 | 0.80 [" in page


def test_stars_follow_the_length_the_people_or_the_user(tmp_path: Path) -> None:
    def starred(rows: list[dict], threshold: float | None = None) -> bool:  # type: ignore[type-arg]
        out = tmp_path / "report"
        config = ReportConfig((folder(tmp_path, rows),), out, threshold=threshold)
        return "(4.6)\\*" in write_report(config, QUIET).read_text()

    low = [row("A", 8, 50.0, 4.6), row("B", 8, 60.0, 5.5)]
    assert starred(low)  # 1024 tokens: the paper's 5
    short = [{**one, "max_length": 256} for one in low]
    assert not starred(short)
    assert starred(short, threshold=4.7)
    assert starred([{**one, "reference_entropy": 5.1} for one in short])
    assert not starred([{**one, "reference_entropy": 5.0} for one in short])


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cdlm eval MODEL\.\.\. --judge JUDGE --out"):
        write_report(ReportConfig((tmp_path / "nowhere",), tmp_path / "report"), QUIET)
    with pytest.raises(ValueError, match="no finished cell"):
        write_report(ReportConfig((folder(tmp_path, []),), tmp_path / "report"), QUIET)
    with pytest.raises(ValueError, match="cdlm moons"):
        ReportConfig((tmp_path,), moons=tmp_path)
    with pytest.raises(ValueError, match="no model 'UDLM' to compare with; there are: MDLM"):
        write_report(ReportConfig((folder(tmp_path, [row()], "one"),), tmp_path / "report", baseline="UDLM"), QUIET)
    with pytest.raises(ValueError, match="name the results"):
        ReportConfig(())
    (tmp_path / "results" / "results.jsonl").write_text("{broken\n{}\n")
    with pytest.raises(ValueError, match="line 1 of"):
        write_report(ReportConfig((tmp_path / "results",), tmp_path / "report"), QUIET)
