"""Three slips in the peers' code, from their formulas: how large they are, and that ours does not make them.

docs/peers.md states the numbers that are asserted here.
"""

import math

import pytest
import torch
from torch import Tensor

from cdlm.methods import METHODS
from cdlm.process import uniform
from cdlm.process.gaussian import Gaussian, operator
from cdlm.rng import seeded

V = 7


def dense_loss(alpha: Tensor, slope: Tensor, x: int, z: int, predicted: Tensor) -> Tensor:
    """UDLM's loss of one position in continuous time: alpha' / (v alpha) [v/q_z - v/p_z - sum_j q_j/q_z log(...)]."""
    one_hot = torch.eye(V, dtype=torch.float64)[x]
    truth, guess = (V * alpha[:, None] * law + 1 - alpha[:, None] for law in (one_hot, predicted))
    ratio = guess[:, z : z + 1] * truth / (guess * truth[:, z : z + 1])
    terms = V / truth[:, z] - V / guess[:, z] - (truth / truth[:, z : z + 1] * ratio.log()).sum(-1)
    return slope / (V * alpha) * terms


def nelbo(law: Tensor, alpha_noise: Tensor, alpha_loss: Tensor, slope: Tensor, t: Tensor) -> float:
    """Exactly over x_0 and x_t, for the best prediction that a single position allows: its law."""
    total = torch.zeros_like(t)
    for x in range(V):
        for z in range(V):
            share = alpha_noise * (x == z) + (1 - alpha_noise) / V
            total += law[x] * share * dense_loss(alpha_loss, slope, x, z, law)
    return float(torch.trapezoid(total, t))


def test_the_loss_of_udlm_assumes_another_schedule_than_its_noise() -> None:
    """With one schedule the NELBO of the best model is the entropy of the data. UDLM's code noises with
    alpha = 1 - 0.999 t and computes the loss for alpha = 1 - t: the result is below the entropy, so it is no bound."""
    law = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.04, 0.01], dtype=torch.float64)
    entropy = float(-(law * law.log()).sum())
    t = torch.linspace(0, 1, 20_001, dtype=torch.float64) ** 3  # dense where the loss changes fast
    t = t[1:-1]
    noise, slope = 1 - 0.999 * t, torch.full_like(t, -0.999)
    ours = nelbo(law, noise, noise, slope, t)
    theirs = nelbo(law, noise, 1 - t, torch.full_like(t, -1), t)
    assert ours == pytest.approx(entropy, abs=2e-5)
    assert theirs - entropy == pytest.approx(-0.0008, abs=5e-5)

    # The row of the table computes the loss at the alpha that its tokens were noised with.
    (term,) = METHODS["udlm"](uniform(V), total=1).terms
    b, l = 64, 4096
    x0 = torch.randint(0, V, (b, l))
    pair = term.draw(x0, 0.0, torch.arange(b), b, seeded(0, batch=b), None)
    assert torch.allclose(pair.alpha_t, 1 - 0.999 * pair.t, atol=1e-12)
    kept = (pair.x_t == x0).double().mean(-1)
    assert float((kept - pair.alpha_t - (1 - pair.alpha_t) / V).abs().max()) < 4.5 * math.sqrt(0.25 / l)


SPACING = 4 / 99_999
"""DUO tabulates alpha at 100,000 values of gamma between -5 and -1, and looks up the nearest."""


def table(gamma: Tensor, vocab: int = 50_257) -> Tensor:
    """DUO's alpha(gamma): P of the nearest entry of a table for 50,257 tokens, with the 50,258 of its model."""
    nearest = -5 + ((gamma + 5) / SPACING).round() * SPACING
    win = (operator(nearest, vocab)[0] * (vocab - 1) + 1) / vocab
    return (50_258 * win - 1) / 50_257


def test_the_derivative_of_duo_is_a_forward_difference_of_a_table() -> None:
    """(alpha(gamma + 0.001) - alpha(gamma)) / 0.001 from the table is up to 0.2 % off. Ours is exact."""
    gamma = -3.55 + 1.7 * torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theirs = (table(gamma + 1e-3) - table(gamma)) / 1e-3
    exact = operator(gamma, 50_258)[1]
    error = (theirs / exact - 1).abs().max()
    assert float(error) == pytest.approx(0.0020, abs=1e-4)
    h = 1e-5
    central = (operator(gamma + h, 50_258)[0] - operator(gamma - h, 50_258)[0]) / (2 * h)
    assert torch.allclose(exact, central, rtol=1e-7)
    smooth = (operator(gamma + 1e-3, 50_258)[0] - operator(gamma, 50_258)[0]) / 1e-3
    assert float((smooth / exact - 1).abs().max()) > 0.95 * float(error)  # by its one side, and not by the rounding
    t = (gamma + 3.55) / 1.7
    assert torch.allclose(Gaussian(50_258).derivative(t), exact * 1.7)


def test_the_table_of_duo_is_for_one_token_less() -> None:
    """It changes alpha by less than the rounding to the nearest entry does: harmless, and exact here."""
    gamma = -5 + torch.arange(34_000, 80_000, 2_000, dtype=torch.float64) * SPACING
    exact = operator(gamma, 50_258)[0]
    off_by_one = (table(gamma) - exact).abs().max()
    rounding = (operator(gamma + SPACING / 2, 50_258)[0] - exact).abs().max()
    assert float(off_by_one) == pytest.approx(1.7e-6, rel=0.05)
    assert float(rounding) == pytest.approx(1.7e-5, rel=0.05)


def sdtt_times(t: float, dt: float) -> tuple[float, float]:
    """The two times of SDTT's teacher: an interpolation from t to t - dt that weighs the end by 1 - t."""
    return tuple(t * place + (t - dt) * (1 - t) for place in (1.0, 0.0))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("t", "times", "ratio"), [(0.1, (0.189, 0.089), 0.82), (0.5, (0.75, 0.25), 1.33), (0.9, (0.99, 0.09), 5.4)]
)
def test_the_time_grid_of_sdtt(t: float, times: tuple[float, float], ratio: float) -> None:
    """Each step of the teacher reveals a masked token with probability dt / t. At the times of its code that is more
    or less than at the intended ones, t and t - dt."""
    dt = (1 - 1e-5) / 1024
    found = sdtt_times(t, dt)
    assert found == pytest.approx(times, abs=1e-3)
    revealed = [1 - math.prod(1 - dt / time for time in grid) for grid in (found, (t, t - dt))]
    assert revealed[0] / revealed[1] == pytest.approx(ratio, abs=0.06)
