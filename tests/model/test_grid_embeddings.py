"""Embeddings of rows, columns and boxes: learned positions whose vectors are the sums of three."""

import json

import pytest
import torch
from safetensors.torch import load_file

from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import load_denoiser, save_denoiser
from cdlm.process import masked, uniform
from cdlm.rng import seeded
from cdlm.sample.draw import last
from cdlm.sample.generate import generate
from cdlm.sample.settings import resolve

NAMES = ("row_embed", "column_embed", "box_embed")


def as_positions(net: Denoiser, side: int) -> Denoiser:
    """The same network with one learned vector for each position, added up by the rules of the puzzle."""
    shape = {**vars(net.config), "grid_embeddings": 0, "position_embeddings": side * side}
    other = Denoiser(NetworkConfig(**shape), net.process, vocab=net.vocab if net.process is None else None)
    weights = net.state_dict()
    rows, columns, boxes = (weights.pop(f"backbone.{name}") for name in NAMES)
    width = {4: 2, 6: 3, 9: 3}[side]
    height = side // width
    weights["backbone.position_embed"] = torch.stack(
        [
            rows[cell // side] + columns[cell % side] + boxes[cell // side // height * height + cell % side // width]
            for cell in range(side * side)
        ]
    )
    other.load_state_dict(weights)
    return other


@pytest.mark.parametrize("side", [4, 6, 9])
@pytest.mark.parametrize("process", [masked(7), uniform(7), None], ids=["masked", "uniform", "ar"])
def test_they_are_sums_of_three(process, side, tiny):
    net = tiny(process, grid_embeddings=side)
    x, t = torch.randint(7, (3, side * side - (process is None))), torch.tensor([0.2, 0.6, 0.9])
    torch.testing.assert_close(net(x, t), as_positions(net, side)(x, t), rtol=1e-5, atol=1e-5)


def test_autoregressive_sampling_has_them(tiny):
    net, settings = tiny(grid_embeddings=4), resolve({}, None)
    x = torch.arange(7)[:, None].expand(7, 16).clone()

    def sampled(model):
        return last(generate(model, None, x, settings, seeded(0, batch=7))).x

    assert torch.equal(sampled(net), sampled(as_positions(net, 4)))


def test_an_empty_grid_is_not_the_same_everywhere(tiny):
    with_grid, without = tiny(masked(7), grid_embeddings=4), tiny(masked(7))
    blank = torch.full((1, 16), 7)
    assert not with_grid.position_invariant
    assert without.position_invariant
    with torch.no_grad():
        spread, none = (float(net(blank).exp().std(1).max()) for net in (with_grid, without))
    assert spread > 1e-3
    assert none < 1e-6


def test_files_keep_them_and_older_ones_have_none(tiny, tmp_path):
    net = tiny(masked(7), grid_embeddings=6)
    save_denoiser(net, tmp_path / "new")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    assert {name: tuple(tensors[f"backbone.{name}"].shape) for name in NAMES} == dict.fromkeys(NAMES, (6, 16))
    assert not any("cells" in name for name in tensors)
    loaded = load_denoiser(tmp_path / "new")
    assert loaded.config.grid_embeddings == 6
    x = torch.randint(8, (2, 36))
    assert torch.equal(loaded(x), net(x))

    save_denoiser(tiny(masked(7)), tmp_path / "old")
    assert "grid_embeddings" not in json.loads((tmp_path / "old" / "config.json").read_text())["network"]
    assert load_denoiser(tmp_path / "old").config.grid_embeddings == 0


def test_limits(tiny):
    with pytest.raises(ValueError, match="embeddings for 16 positions \\(got a length of 17\\)"):
        tiny(masked(7), grid_embeddings=4)(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="grid_embeddings must be at least 0"):
        NetworkConfig(grid_embeddings=-1)
