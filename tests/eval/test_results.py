"""Rows and samples on disk: today's format, and what version 1 wrote."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cdlm.eval.config import EvalConfig
from cdlm.eval.results import (
    FORMAT,
    append_row,
    migrate,
    read_rows,
    read_samples,
    row_key,
    samples_by_key,
    samples_key,
    write_samples,
)
from cdlm.eval.sweep import evaluate
from cdlm.sample import settings as schema
from cdlm.sample.samplers import PENALTIES
from cdlm.sample.settings import Settings, explicit, resolve
from cdlm.text.pipeline import Pipeline

from .suites import QUIET, config, nothing

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "fef84f3"
VERSION_1 = {
    "steps": 8,
    "grid": "uniform",
    "order": "random",
    "bound": None,
    "tail": "none",
    "corrector": "none",
    "eta": None,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "precision": "fp64",
    "posterior": "auto",
}


def migrated(process: str = "masked", method: str | None = None, **changes: Any) -> dict[str, Any]:
    trained = {"trained": {"method": method, "steps": 1, "from": None}} if method else {}
    return migrate({"process": process, "sampling": {**VERSION_1, **changes}, **trained})["sampling"]


def test_settings_of_the_first_version_are_completed() -> None:
    """Renamed, with the values by which version 1 sampled, and with the sampler that it chose."""
    plain = dataclasses.asdict(resolve({"steps": 8}))
    assert migrated() == plain
    assert migrated(block=0, cool=None, guidance=0.5) == {**plain, "guidance": 0.5}
    assert migrated(grid="cosine", tail="argmax", cool=0.8) == {
        **plain,
        "timesteps": "cosine",
        "final_step": "argmax",
        "temperature_end": 0.8,
    }
    assert migrated(corrector="loop", eta=0.1) == dataclasses.asdict(
        resolve({"steps": 8, "corrector": "loop", "eta": 0.1})
    )
    assert migrated(steps=None, grid="1,0.5,0") == dataclasses.asdict(resolve({"timesteps": "1,0.5,0"}))
    assert migrated(steps=None, order="first-hitting") == dataclasses.asdict(resolve({"order": "first-hitting"}))
    for order in ("probability", "margin", "entropy-bound", "dilated"):
        assert migrated(order=order) == dataclasses.asdict(resolve({"steps": 8, "order": order}))
    assert migrated(precision="naive-fp32") == dataclasses.asdict(resolve({"steps": 8, "precision": "naive-fp32"}))
    assert migrated("none", steps=None, top_p=0.9) == dataclasses.asdict(resolve({"top_p": 0.9}, None))


def test_the_posterior_is_that_of_the_method() -> None:
    assert migrated("uniform", "udlm")["posterior"] == "plug-in"
    assert migrated("uniform", "ucdlm:kappa=0")["posterior"] == "mixture"
    assert migrated("uniform", "ucdlm", posterior="plug-in")["posterior"] == "plug-in"


def test_unknown_and_missing_settings_are_errors(tmp_path: Path) -> None:
    for change, message in (({"sharpness": 2}, "unknown settings of the sampler: sharpness"), ({}, "missing: steps")):
        sampling = VERSION_1 | change if change else {name: VERSION_1[name] for name in VERSION_1 if name != "steps"}
        with pytest.raises(ValueError, match=message):
            migrate({"process": "masked", "sampling": sampling})
    today = dataclasses.asdict(resolve({"steps": 8}))
    for sampling in ({**today, "sharpness": 2}, {name: today[name] for name in today if name != "order"}):
        with pytest.raises(ValueError, match="settings of the sampler"):
            migrate({"format": FORMAT, "sampling": sampling})
    append_row(tmp_path, {"format": 99})
    with pytest.raises(ValueError, match=r"line 1 of .*results\.jsonl cannot be read \(it has format 99, .*upgrade"):
        read_rows(tmp_path)


def test_a_row_without_the_penalties_was_sampled_without_them() -> None:
    today = dataclasses.asdict(resolve({"steps": 8}))
    before = {name: value for name, value in today.items() if name not in PENALTIES}
    assert migrate({"format": FORMAT, "sampling": before})["sampling"] == today


def test_a_default_that_changes_gives_no_old_key_a_new_meaning(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed under the old default is another cell under the new one, which is computed anew."""
    asked = {"models": (str(work / "masked"),), "steps": (2,)}
    (old,) = evaluate(config(work, tmp_path, **asked), QUIET)
    monkeypatch.setitem(schema.DEFAULTS, "top_k", 1)
    (new,) = evaluate(config(work, tmp_path, **asked), QUIET)
    assert (old["sampling"]["top_k"], new["sampling"]["top_k"]) == (0, 1)
    assert old["key"] != new["key"]
    assert old["ppl"] != new["ppl"]
    assert [row["key"] for row in read_rows(tmp_path)] == [old["key"], new["key"]]


def fixture_sweeps(out: Path) -> list[dict[str, Any]]:
    """The two evaluations of the fixture, as they were asked for: their samples, and then their bounds, which were
    those of samplers without temperature, top-p and guidance."""
    final = FIXTURE / "final"
    shared: dict[str, Any] = {
        "models": (f"MDLM={final / 'mdlm'}", f"MCDLM={final / 'mcdlm'}"),
        "judge": (str(final / "ar"),),
        "num_samples": 4,
        "likelihood_samples": 4,
        "steps": (2, 4),
        "device": "cpu",
        "dtype": "float32",
        "out": out,
    }
    samples = {**shared, "temperature": (1.0, 0.8)}
    bounds = {**shared, "judge": (), "tasks": ("likelihood",), "texts": (f"held={FIXTURE / 'texts.txt'}",)}
    return [
        {**samples, "top_p": (0.9,)},
        {**samples, "order": ("dilated",), "guidance": (0.5,)},
        bounds,
        {**bounds, "order": ("dilated",)},
    ]


@pytest.fixture
def old_results(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE / "results", tmp_path / "results")
    return tmp_path / "results"


def test_cells_that_the_first_version_has_finished_are_finished(
    old_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (old_results / "results.jsonl").read_bytes()
    monkeypatch.setattr(Pipeline, "complete", nothing)
    monkeypatch.setattr("cdlm.eval.sweep.score_samples", nothing)
    monkeypatch.setattr("cdlm.eval.sweep.measure_likelihood", nothing)
    rows = [row for asked in fixture_sweeps(old_results) for row in evaluate(EvalConfig(**asked), QUIET)]
    assert len(rows) == len(read_rows(old_results)) == len(before.splitlines())
    assert (old_results / "results.jsonl").read_bytes() == before


def test_samples_of_the_first_version_are_scored_again(old_results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rows are gone, the numbers are those of the kept samples; nothing is generated."""
    expected = {row["key"]: row for row in read_rows(old_results) if "ppl" in row}
    (old_results / "results.jsonl").unlink()
    monkeypatch.setattr(Pipeline, "complete", nothing)
    for asked in fixture_sweeps(old_results)[:2]:
        evaluate(EvalConfig(**asked), QUIET)
    found = {row["key"]: row for row in read_rows(old_results)}
    assert found.keys() == expected.keys()
    for key, row in found.items():
        assert row["ppl"] == pytest.approx(expected[key]["ppl"], rel=1e-5)
        assert row["per_sample"]["entropy"] == expected[key]["per_sample"]["entropy"]


def test_samples_are_found_by_their_header(old_results: Path) -> None:
    files = samples_by_key(old_results)
    assert len(files) == len(list((old_results / "samples").iterdir()))
    for key, path in files.items():
        samples = read_samples(path)
        assert samples.header["key"] == samples_key(samples.header) == key
        assert samples.lines[0].keys() == {"index", "text", "token_ids", "nfe"}
        write_samples(path, samples)
        assert read_samples(path) == samples


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("studies/results/**/results.jsonl")), ids=lambda p: str(p.parent.name)
)
def test_rows_of_the_studies_have_todays_format(path: Path) -> None:
    """Every row is migrated once and for all; its settings can be asked for, and it keeps its numbers."""
    old = [json.loads(line) for line in path.read_text().splitlines()]
    for row, before in zip(read_rows(path), old, strict=True):
        assert row["format"] == FORMAT
        assert migrate(row) is row
        assert row["key"] == row_key(row) == row_key(json.loads(json.dumps(row)))
        assert row["num_samples"] == before.get("num", before.get("num_samples"))
        assert row.get("ppl") == before.get("ppl")
        assert row.get("nelbo") == before.get("nelbo")
        if row.get("sampling"):
            settings = Settings(**row["sampling"])
            process = None if row["process"] == "none" else "any"
            assert resolve(explicit(settings), process, settings.posterior) == settings


def test_rows_of_one_directory_have_keys_of_their_own(old_results: Path) -> None:
    rows = read_rows(old_results)
    assert len({row["key"] for row in rows}) == len(rows)
