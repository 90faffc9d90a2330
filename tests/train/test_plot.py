"""The schedules of the paper as they are plotted and trained, and the pictures of a run."""

from pathlib import Path
from typing import Any

import pytest

from cdlm.methods.spec import parse_method
from cdlm.train import plot
from cdlm.train.loop import train
from cdlm.train.plot import plot_run, plot_schedules
from cdlm.train.recipes import RECIPES


def objective(name: str):
    config = RECIPES[name].config
    method, choices = parse_method(config.method)
    return method(method.default_process(5), config.steps, **choices)


def test_schedules_of_mcdlm_pplopt_are_the_papers() -> None:
    """delta maximum 5/8 -> 3/8 and kappa .4 -> .2 between 100K and 150K; lambda .999, then a copy every 10K."""
    found = objective("mcdlm-pplopt")
    consistency, anchor = found.terms
    for step, high, kappa in ((0, 5 / 8, 0.4), (100_000, 5 / 8, 0.4), (125_000, 1 / 2, 0.3), (150_000, 3 / 8, 0.2)):
        progress = step / 150_000
        assert consistency.times.high(progress) == pytest.approx(high)
        assert consistency.times.low(progress) == 1 / 8
        assert anchor.share(progress) == pytest.approx(kappa)
        assert consistency.share(progress) == pytest.approx(1 - kappa)
    assert found.lam(50_000) == pytest.approx(0.999)
    copies = [step + 1 for step in range(150_000) if found.lam(step) == 0]
    assert copies == [100_000, 110_000, 120_000, 130_000, 140_000, 150_000]
    assert found.lam(105_000) == 1


def test_schedules_of_ucdlm_are_the_papers() -> None:
    found = objective("ucdlm")
    for step in (0, 60_000, 150_000):
        delta = 0.125 + 0.25 * step / 150_000
        assert (
            found.terms[0].times.low(step / 150_000)
            == found.terms[0].times.high(step / 150_000)
            == pytest.approx(delta)
        )
        assert found.terms[1].share(step / 150_000) == 0.4


def test_a_run_of_an_earlier_version_is_drawn(tmp_path: Path) -> None:
    run = Path(__file__).parents[1] / "fixtures" / "fef84f3" / "trained" / "mcdlm"
    assert plot_run(run, tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["mcdlm-pplopt", "ucdlm", "sdtt", "mdlm"])
def test_schedules_are_drawn(name: str, tmp_path: Path) -> None:
    path = plot_schedules(RECIPES[f"tiny-{name}"].config, name, tmp_path / "new" / "schedules.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_lambda_is_drawn_as_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of 100K steps quotes its decay for 100K steps, so there .999 is .999."""
    monkeypatch.setattr(plot, "_save", lambda figure, _: figure)
    figure: Any = plot_schedules(RECIPES["mcdlm-100k"].config, "mcdlm-100k", Path("unused"))
    drawn = figure.axes[2].lines[0].get_ydata()
    assert drawn[-1] == pytest.approx(0.999, abs=1e-9)


def test_a_run_is_drawn(recipe) -> None:
    config = recipe("mcdlm", valid_samples=1, valid_every=6)
    train(config)
    assert plot_run(config.out, config.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="is it a run directory"):
        plot_run(config.data, config.out / "none.png")
