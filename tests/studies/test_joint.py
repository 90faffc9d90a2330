"""The study of the joint head: its loss is that of the method, its reference is exact, and it runs."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import cdlm
from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.methods import METHODS
from cdlm.metrics.sampler_likelihood import repeated_sampler_nats
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.joint import JointHead
from cdlm.model.pretrained import save_denoiser
from cdlm.process import masked
from cdlm.rng import seeded
from cdlm.sample.settings import resolve
from studies.joint import VARIANTS, Trunk, bounds, bounds_table, draw_pairs, main, of_rows, train_heads

V, L, B = 7, 12, 22


@pytest.fixture
def network() -> Denoiser:
    config = NetworkConfig(hidden_size=16, num_layers=1, num_heads=2, cond_dim=8, dropout=0.0, joint_layers=1)
    net = Denoiser(config, masked(V))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    return net


def data(step: int) -> torch.Tensor:
    return seeded(step, "x", batch=B).integers(L, 3)


def test_the_loss_of_the_study_is_that_of_the_method(network: Denoiser) -> None:
    objective, rng = METHODS["joint"](network.process, 1), seeded(0, batch=B)
    expected = objective.loss(network, None, data(0), 0, rng).total
    trunk = Trunk(network)
    pairs = draw_pairs(objective, data(0), 0, rng)
    found = trunk.features(pairs)
    weight = of_rows(pairs, found, torch.cat([1 / (pair.t - pair.s) for pair in pairs]))
    nats = trunk.nats(found, VARIANTS["lr 1e-3"], network.joint_head)
    assert float((nats * weight).sum() / (B * L)) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_the_bound_of_the_study_is_that_of_the_package(network: Denoiser) -> None:
    head, process = network.joint_head, network.process
    assert head is not None
    assert process is not None
    found = bounds(Trunk(network), {"head": (VARIANTS["lr 1e-3"], head)}, data(1), 2, "dilated", "float32", 2, 5)
    for name, sampler in (("factorised", "ancestral"), ("head", "joint")):
        settings = resolve({"steps": 2, "order": "dilated", "sampler": sampler}, process, joint_head=True)
        truth = repeated_sampler_nats(network, process, data(1), settings, 4) / L
        error = float((found[name].mean() - truth.mean()).abs())
        assert error < 5 * float((found[name] - truth.mean(-1)).std()) / B**0.5


def test_heads_of_every_variant_learn_and_start_as_the_trunk(network: Denoiser) -> None:
    trunk = Trunk(network)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    chosen = {name: VARIANTS[name] for name in ("lr 3e-3", "before norm", "gate", "2 blocks", "per token")}
    heads, _ = train_heads(trunk, chosen, data, 1.0, "float32", 0, max_steps=0)
    at_start = bounds(trunk, {k: (chosen[k], heads[k]) for k in chosen}, data(9), 1, "random", "float32", 1, 64)
    for name in chosen:
        assert torch.allclose(at_start[name], at_start["factorised"], rtol=1e-4)
    heads, log = train_heads(trunk, chosen, data, 1.0, "float32", 0, max_steps=25)
    assert log[-1]["step"] == 25
    after = bounds(trunk, {k: (chosen[k], heads[k]) for k in chosen}, data(9), 1, "random", "float32", 1, 64)
    for name in ("lr 3e-3", "2 blocks"):
        assert float(after[name].mean()) < float(after["factorised"].mean())
    assert all(isinstance(head, JointHead) for head in heads.values())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_text_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, tokens, model, out = (tmp_path / name for name in ("text.txt", "tokens", "model", "out"))
    text.write_text("\n<|endoftext|>\n".join(["the cat sees fish. " * 40] * 8))
    prepare(PrepareConfig((str(text),), tokens, packing="plain", seq_length=16, valid_documents=2))
    config = NetworkConfig(hidden_size=16, num_layers=1, num_heads=2, cond_dim=8, dropout=0.0)
    save_denoiser(Denoiser(config, masked(257)), model)
    (model / "tokenizer.json").write_bytes((tokens / "tokenizer.json").read_bytes())
    sizes = ["--max-steps", "2", "--batch-size", "11", "--sequences", "3", "--hops", "1", "--variants", "2 blocks"]
    flags = ["--data", str(tokens), "--model", str(model), "--out", str(out), "--device", "cpu", *sizes]
    monkeypatch.setattr("sys.argv", ["joint", "text", *flags])
    main()
    result = json.loads((out / "text.json").read_text())
    assert len(result["bounds"]) == 11
    assert result["best"] == "2 blocks"
    pipe = cdlm.load(out / "2-blocks", "cpu")
    assert pipe.denoiser.config.joint_layers == 2
    assert pipe.resolve({"steps": 2}).sampler == "joint"


def test_sudoku_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv",
        ["joint", "sudoku", "--minutes", "0.002", "--steps", "1", "4", "--samples", "20", "--out", str(tmp_path)],
    )
    threads = torch.get_num_threads()
    main()
    torch.set_num_threads(threads)
    result = json.loads((tmp_path / "sudoku.json").read_text())
    assert result["rows"].keys() == {"exact factorised", "mdlm", "joint"}
    exact = [cell["nats"] for cell in result["rows"]["exact factorised"].values()]
    assert exact[0] == pytest.approx(16 * math.log(4))
    assert result["entropy"] == pytest.approx(math.log(288))
    assert exact == sorted(exact, reverse=True)
    assert exact[-1] > result["entropy"]


def test_the_page_has_the_recorded_bounds() -> None:
    root = Path(__file__).parents[2]
    found = json.loads((root / "studies" / "results" / "joint" / "text.json").read_text())
    shown = (
        (root / "docs" / "joint.md").read_text().partition("<!-- joint text -->\n")[2].partition("\n<!-- end -->")[0]
    )
    assert shown == bounds_table(found)


def test_the_recorded_head_fits_the_bundled_model() -> None:
    root = Path(__file__).parents[2]
    head = load_file(root / "studies" / "results" / "joint" / "head.safetensors")
    denoiser = cdlm.load("mdlm", "cpu", "float32").denoiser
    with_head = Denoiser(dataclasses.replace(denoiser.config, joint_layers=1), denoiser.process)
    assert head.keys() == {name for name in with_head.state_dict() if name.startswith("joint_head.")}
    assert sum(tensor.numel() for tensor in head.values()) == 2_224_896
