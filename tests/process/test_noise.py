"""Noise schedules: their ends, slopes and inverses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm.process import SCHEDULES, Cosine, LogLinear

schedules = pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES.keys())
times = st.integers(0, 10_000).map(lambda i: i / 10_000)
floors = st.sampled_from([0.0, 1e-5, 1e-3, 0.1])


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@schedules
@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-3, 0.1])
def test_all_signal_at_0_and_eps_at_1(kind, eps):
    alpha = kind(eps).alpha(double(0, 1))
    assert float(alpha[0]) == 1  # exactly: the boundary condition compares with 1
    assert float(alpha[1]) == pytest.approx(eps, abs=1e-15)


@schedules
@settings(deadline=None, derandomize=True, max_examples=40)
@given(t=times, eps=floors)
def test_derivative_by_autograd_and_by_differences(kind, t, eps):
    noise = kind(eps)
    x = double(t).requires_grad_()
    (slope,) = torch.autograd.grad(noise.alpha(x).sum(), x)
    assert float(noise.derivative(double(t))) == pytest.approx(float(slope), abs=1e-12)
    h = 1e-5
    middle = min(max(t, h), 1 - h)
    ends = noise.alpha(double(middle - h, middle + h))
    assert float(noise.derivative(double(middle))) == pytest.approx(float(ends[1] - ends[0]) / (2 * h), abs=1e-8)


@schedules
@settings(deadline=None, derandomize=True, max_examples=40)
@given(t=times, eps=floors)
def test_inverse_undoes_alpha(kind, t, eps):
    noise = kind(eps)
    again = float(noise.inverse(noise.alpha(double(t))))
    # The cosine is flat at t = 1, so there a rounding of alpha moves t by its square root.
    assert again == pytest.approx(t, abs=1e-13 if kind is LogLinear or t < 0.99 else 1e-7)
    assert float(noise.alpha(double(again))) == pytest.approx(float(noise.alpha(double(t))), abs=1e-14)


@schedules
def test_signal_falls_all_the_way(kind):
    alpha = kind().alpha(torch.linspace(0, 1, 1001, dtype=torch.float64))
    assert bool((alpha[1:] < alpha[:-1]).all())
    assert bool((kind().derivative(torch.linspace(0, 0.999, 1001, dtype=torch.float64)) < 0).all())


def test_log_linear_is_linear_and_cosine_is_a_quarter_wave():
    t = double(0.1, 0.5, 0.8)
    assert LogLinear(0.0).alpha(t).tolist() == pytest.approx([0.9, 0.5, 0.2])
    truth = [1 - math.cos(math.pi / 2 * (1 - value)) for value in t.tolist()]
    assert Cosine(0.0).alpha(t).tolist() == pytest.approx(truth)


@schedules
def test_default_eps_is_that_of_the_public_checkpoints(kind):
    assert kind().eps == 1e-3
