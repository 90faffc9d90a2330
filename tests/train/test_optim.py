"""Optimisers: who moves which weight, that Muon's step is what its definition says, and that runs with it resume."""

import dataclasses
from pathlib import Path

import pytest
import torch

from cdlm.methods import METHODS
from cdlm.model.config import SIZES
from cdlm.model.denoiser import Denoiser
from cdlm.process import masked
from cdlm.train import checkpoint
from cdlm.train.config import TrainConfig
from cdlm.train.loop import train
from cdlm.train.optim import optimizer_step
from cdlm.train.step import make_learner

from .test_resume import assert_same_bits

SHAPE = dataclasses.replace(SIZES["tiny"], position_embeddings=8, tie_embeddings=True)
MATRICES = {"attn_qkv.weight", "attn_out.weight", "mlp.0.weight", "mlp.2.weight"}


def start(optimizer: str, **more):
    torch.manual_seed(0)
    process = masked(11)
    config = TrainConfig("mdlm", network=SHAPE, optimizer=optimizer, learning_rate=0.01, dtype="float32", **more)
    net = Denoiser(SHAPE, process)
    return make_learner(config, net, METHODS["mdlm"](process, 10), None)


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    state = start("muon")
    names = {parameter: name for name, parameter in state.denoiser.named_parameters()}
    muon, adamw = ([names[p] for p in one.param_groups[0]["params"]] for one in state.optimizers)
    assert {name.split(".", 3)[3] for name in muon} == MATRICES
    assert len(muon) == len(MATRICES) * SHAPE.num_layers
    assert sorted(muon + adamw) == sorted(names.values())
    (alone,) = start("adamw").optimizers
    assert len(alone.param_groups[0]["params"]) == len(names)


def test_a_step_of_muon_is_orthogonal_and_as_large_as_one_of_adamw() -> None:
    """By singular values: those of the update lie around 0.2 lr sqrt(longest side), whatever the gradient's are."""
    state = start("muon")
    before = {name: parameter.detach().clone() for name, parameter in state.denoiser.named_parameters()}
    for parameter in state.denoiser.parameters():
        parameter.grad = torch.ones_like(parameter)
        if parameter.ndim == 2:  # directions that differ tenfold in size
            u, s, v = torch.linalg.svd(torch.randn_like(parameter), full_matrices=False)
            parameter.grad = u @ torch.diag(torch.logspace(0, -1, len(s))) @ v
    optimizer_step(state.optimizers, 0.01)
    for name, parameter in state.denoiser.named_parameters():
        moved = before[name] - parameter.detach()
        assert parameter.grad is None
        if ".blocks." in name and name.endswith(tuple(MATRICES)):
            values = torch.linalg.svdvals(moved) / (0.01 * 0.2 * max(moved.shape) ** 0.5)
            assert 0.5 < float(values.min()) < float(values.max()) < 1.4, name
        elif moved.ndim == 1:
            assert torch.allclose(moved, torch.full_like(moved, 0.01), rtol=1e-3), name


def test_decay_shrinks_what_has_no_gradient() -> None:
    state = start("muon", weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in state.denoiser.named_parameters()}
    for parameter in state.denoiser.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer_step(state.optimizers, 0.01)
    for name, parameter in state.denoiser.named_parameters():
        assert torch.allclose(parameter, before[name] * (1 - 0.01 * 0.5)), name


def test_a_stopped_run_with_muon_ends_with_the_same_bits(recipe, tmp_path: Path) -> None:
    config = recipe("mcdlm", steps=12, save_every=4, optimizer="muon")
    whole = train(dataclasses.replace(config, out=tmp_path / "whole"))
    last = train(config)
    assert [step for step, _ in checkpoint.listed(config.out)] == [8, 12]
    checkpoint._remove(last)
    assert_same_bits(whole, train(config, "auto"))


def test_another_optimiser_is_named_even_when_forced(recipe, tmp_path: Path) -> None:
    config = recipe("mdlm", steps=4, save_every=2)
    train(config)
    other = dataclasses.replace(config, steps=6, optimizer="muon")
    with pytest.raises(ValueError, match="optimizer: adamw -> muon"):
        train(other, "auto")
    with pytest.raises(ValueError, match=r"no momentum_buffer of .*another --optimizer"):
        train(other, "force")


def test_shards_are_refused() -> None:
    with pytest.raises(ValueError, match="full matrices"):
        TrainConfig("mdlm", optimizer="muon", parallel="fsdp")
