"""Model folders: what is written comes back, and what is not a model is refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import cdlm
from cdlm.model import pretrained
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import LayoutError, load_denoiser, migrate_model_config, read_model_config, save_denoiser
from cdlm.process import Cosine, LogLinear, masked, uniform, unigram

V = 7
PROCESSES = {
    "masked": masked(V),
    "masked-cosine": masked(V, Cosine(0.02)),
    "uniform": uniform(V, LogLinear(1e-4)),
    "unigram": unigram(torch.arange(1.0, V + 1)),
    "mask-and-unigram": unigram(torch.arange(1.0, V + 2), vocab=V),
    "ar": None,
}


@pytest.fixture
def folder(tmp_path, tiny):
    """A good folder, to be spoilt."""
    return save_denoiser(tiny(masked(V)), tmp_path / "model")


def spoil_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            del config[name]
        else:
            config[name] = value
    path.write_text(json.dumps(config))


def spoil_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
@pytest.mark.parametrize("conditioned", [False, True])
def test_round_trip(process, conditioned, tiny, tmp_path):
    net = tiny(process, time_conditioning=conditioned, dropout=0.25).train()
    again = load_denoiser(save_denoiser(net, tmp_path / "a" / "b"))
    assert again.config == net.config
    assert again.vocab == net.vocab
    assert not again.training
    for name, tensor in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    if process is None:
        assert again.process is None
    else:
        assert again.process.noise == process.noise
        assert again.process.name == process.name
        assert torch.equal(again.process.prior, process.prior)
        assert again.process.prior.dtype == torch.float64
    x = torch.randint(V if process is None else process.states, (2, 5))
    assert torch.equal(again(x, 0.4), net.eval()(x, 0.4))


def test_saving_twice_writes_the_same_bytes(tiny, tmp_path):
    net = tiny(masked(V))
    first, second = save_denoiser(net, tmp_path / "1"), save_denoiser(load_denoiser(tmp_path / "1"), tmp_path / "2")
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize("part", [None, 100_000], ids=["whole", "parts"])
def test_weights_are_for_whoever_may_read_the_rest(part, tiny, tmp_path):
    save_denoiser(tiny(masked(V)), tmp_path / "out", part=part)
    files = list((tmp_path / "out").iterdir())
    assert len({path.stat().st_mode for path in files}) == 1, {path.name: oct(path.stat().st_mode) for path in files}


def test_a_folder_can_be_overwritten(tiny, tmp_path):
    save_denoiser(tiny(masked(V), seed=1), tmp_path)
    save_denoiser(tiny(uniform(V), seed=2), tmp_path)
    assert load_denoiser(tmp_path).process.name == "uniform"


def test_config_is_plain_json_that_says_what_it_is(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["format"] == "cdlm"
    assert config["version"] == 2
    assert config["vocab_size"] == V
    assert config["process"]["name"] == "masked"
    assert config["network"]["hidden_size"] == 16


FEF84F3 = Path(__file__).parents[1] / "fixtures" / "fef84f3" / "final"


def test_a_config_of_version_1_is_read_as_version_2():
    """Each value under its present name, in the history of the training as well."""
    assert json.loads((FEF84F3 / "mcdlm-guided" / "config.json").read_text())["version"] == 1
    config = read_model_config(FEF84F3 / "mcdlm-guided")
    assert config == migrate_model_config(config)
    assert config["version"] == 2
    assert config["vocab_size"] == 257
    assert config["process"] == {"name": "masked", "noise_schedule": "log-linear", "eps": 0.001}
    assert NetworkConfig(**config["network"]).hidden_size == 8
    assert config["text"] == {"max_length": 16, "posterior": "plug-in", "bos_framed": True, "eos_padded": False}
    training = config["training"]
    assert training["method"].startswith("mcdlm")
    assert (training["batch_size"], training["seq_length"]) == (8, 16)
    assert training["from"] == {"method": "mdlm", "steps": 12, "batch_size": 8, "seq_length": 16, "from": None}
    assert config.keys() == {"format", "version", "vocab_size", "process", "network", "text", "training"}


def test_our_own_config_needs_no_migration(folder):
    assert read_model_config(folder) == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("version", ["2", 1.5, True, [2]])
def test_a_version_that_is_no_number_is_named(folder, version):
    spoil_config(folder, version=version)
    with pytest.raises(LayoutError, match=r"version is .*, which is not an integer"):
        load_denoiser(folder)


def test_config_is_read_once_per_load(monkeypatch):
    read = []
    real = pretrained.read_object
    monkeypatch.setattr(pretrained, "read_object", lambda path: read.append(path.name) or real(path))
    cdlm.load("mdlm", "cpu", "float32")
    assert read.count("config.json") == 1


def test_public_checkpoint_without_its_mask_row(peers):
    net = load_denoiser(peers / "mdlm-hf-tiny")
    assert net.process.name == "masked"
    assert net.vocab == 96
    assert net.process.noise == LogLinear()
    raw = load_file(peers / "mdlm-hf-tiny" / "model.safetensors")
    assert torch.equal(net.backbone.vocab_embed.embedding, raw["backbone.vocab_embed.embedding"])
    assert torch.equal(net.backbone.output_layer.linear.weight, raw["backbone.output_layer.linear.weight"][:96])
    assert torch.equal(net.backbone.output_layer.linear.bias, raw["backbone.output_layer.linear.bias"][:96])


def test_public_checkpoint_can_be_saved_as_ours(peers, tmp_path):
    net = load_denoiser(peers / "mdlm-hf-tiny")
    again = load_denoiser(save_denoiser(net, tmp_path))
    x = torch.randint(97, (1, 9))
    assert torch.equal(again(x, 0.5), net(x, 0.5))


def test_missing_folder(tmp_path):
    with pytest.raises(LayoutError, match=r"nowhere does not exist; give a directory with config\.json"):
        load_denoiser(tmp_path / "nowhere")


def test_missing_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(LayoutError, match=r"it has no config\.json"):
        load_denoiser(folder)


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(LayoutError, match=r"has a config\.json but no model\.safetensors; copy the weights"):
        load_denoiser(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.99])
def test_truncated_weights(folder, kept):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(LayoutError, match=r"model\.safetensors is damaged .*; fetch or write it again"):
        load_denoiser(folder)


def test_weights_that_are_something_else(folder):
    (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html>" * 50)
    with pytest.raises(LayoutError, match=r"model\.safetensors is damaged"):
        load_denoiser(folder)


@pytest.mark.parametrize("text", ["", "{", "not json", "\x00"])
def test_bad_json(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(LayoutError, match=r"config\.json is not valid JSON"):
        load_denoiser(folder)


def test_binary_config(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(LayoutError, match=r"config\.json is not valid JSON"):
        load_denoiser(folder)


@pytest.mark.parametrize("text", ["[]", "3", '"mdlm"', "null"])
def test_json_that_is_no_object(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(LayoutError, match=r"config\.json must hold a JSON object"):
        load_denoiser(folder)


def test_foreign_model(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(LayoutError, match="is a gpt2 model, which is not a masked language model") as error:
        load_denoiser(folder)
    assert str(folder) in str(error.value)


def test_foreign_format(folder):
    spoil_config(folder, format="onnx")
    with pytest.raises(LayoutError, match="describes 'onnx'"):
        load_denoiser(folder)


def test_newer_version(folder):
    spoil_config(folder, version=3)
    with pytest.raises(LayoutError, match=r"written by a newer version \(format 3, this one reads 2\); upgrade cdlm"):
        load_denoiser(folder)


@pytest.mark.parametrize("field", ["version", "network", "process", "vocab_size"])
def test_missing_field(folder, field):
    spoil_config(folder, **{field: None})
    with pytest.raises(LayoutError, match=rf"config\.json lacks '{field}'") as error:
        load_denoiser(folder)
    assert str(folder) in str(error.value)


def test_unknown_field_of_the_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    spoil_config(folder, network={**config["network"], "colour": 3})
    with pytest.raises(LayoutError, match="colour"):
        load_denoiser(folder)


@pytest.mark.parametrize("name", ["backbone.blocks.1.attn_qkv.weight", "backbone.output_layer.linear.bias"])
def test_missing_tensor(folder, name):
    spoil_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(LayoutError, match=rf"tensor '{name}' is missing from model\.safetensors") as error:
        load_denoiser(folder)
    assert str(folder) in str(error.value)


def test_missing_prior(folder):
    spoil_tensors(folder, lambda tensors: tensors.pop("prior"))
    with pytest.raises(LayoutError, match=r"'prior' is missing from model\.safetensors"):
        load_denoiser(folder)


def test_wrong_shape(folder):
    name = "backbone.blocks.0.mlp.0.weight"
    spoil_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(64, 15)}))
    with pytest.raises(LayoutError, match=rf"tensor '{name}' has the shape \(64, 15\), .* implies \(64, 16\)"):
        load_denoiser(folder)


def test_extra_tensor(folder):
    spoil_tensors(folder, lambda tensors: tensors.update({"backbone.blocks.2.norm1.weight": torch.ones(16)}))
    with pytest.raises(LayoutError, match=r"unknown tensor 'backbone\.blocks\.2\.norm1\.weight'"):
        load_denoiser(folder)


def test_config_and_weights_of_different_models(folder):
    config = json.loads((folder / "config.json").read_text())
    spoil_config(folder, network={**config["network"], "num_layers": 3})
    with pytest.raises(LayoutError, match=r"tensor 'backbone\.blocks\.2\.\S+' is missing"):
        load_denoiser(folder)


def test_vocabulary_that_does_not_fit_the_prior(folder):
    spoil_config(folder, vocab_size=50)
    with pytest.raises(LayoutError, match="prior") as error:
        load_denoiser(folder)
    assert str(folder) in str(error.value)


def test_architecture_that_does_not_divide(folder):
    config = json.loads((folder / "config.json").read_text())
    spoil_config(folder, network={**config["network"], "num_heads": 3})
    with pytest.raises(LayoutError, match="heads 3") as error:
        load_denoiser(folder)
    assert str(folder) in str(error.value)


def test_unknown_noise_schedule(folder):
    config = json.loads((folder / "config.json").read_text())
    spoil_config(folder, process={**config["process"], "noise_schedule": "geometric"})
    with pytest.raises(LayoutError, match="log-linear") as error:  # the message offers what there is
        load_denoiser(folder)
    assert "geometric" in str(error.value)


def test_damaged_public_checkpoint(peers, tmp_path):
    folder = tmp_path / "mdlm"
    shutil.copytree(peers / "mdlm-hf-tiny", folder)
    spoil_tensors(folder, lambda tensors: tensors.pop("backbone.output_layer.linear.weight"))
    with pytest.raises(LayoutError, match=r"tensor 'backbone\.output_layer\.linear\.weight' is missing"):
        load_denoiser(folder)
    shutil.copy(peers / "mdlm-hf-tiny" / "model.safetensors", folder)
    spoil_config(folder, n_heads=None)
    with pytest.raises(LayoutError, match=r"config\.json lacks 'n_heads'"):
        load_denoiser(folder)


def test_public_checkpoint_with_a_rotary_buffer_loads_all_the_same(peers, tmp_path):
    folder = tmp_path / "mdlm"
    shutil.copytree(peers / "mdlm-hf-tiny", folder)
    spoil_tensors(folder, lambda tensors: tensors.update({"backbone.rotary_emb.inv_freq": torch.ones(8)}))
    x = torch.randint(97, (1, 9))
    assert torch.equal(load_denoiser(folder)(x, 0.5), load_denoiser(peers / "mdlm-hf-tiny")(x, 0.5))


def test_the_layout_of_duo_is_a_uniform_process(tmp_path):
    """Rebuilt from its documented layout: all ids in the head, conditioned on time, cond_dim 129."""
    net = Denoiser(
        NetworkConfig(hidden_size=32, num_layers=2, num_heads=2, cond_dim=129, time_conditioning=True), uniform(13)
    ).eval()
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tensors = {**net.state_dict(), "backbone.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    fields = {
        "model_type": "DUO",
        "vocab_size": 13,
        "model_length": 8,
        "causal": False,
        "hidden_dim": 32,
        "cond_dim": 129,
    }
    fields |= {"n_blocks": 2, "n_heads": 2, "dropout": 0.1, "var_min": True}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = load_denoiser(tmp_path)
    x = torch.arange(8)[None]
    assert found.process.name == "uniform"
    assert torch.equal(found(x, 0.4), net(x, 0.4))
    assert not torch.allclose(found(x, 0.4), found(x, 0.9))


def test_a_schedule_without_an_end_is_refused(tiny, tmp_path):
    folder = save_denoiser(tiny(uniform(V), time_conditioning=True), tmp_path)
    spoil_config(folder, process={"name": "uniform", "noise_schedule": "log-linear", "eps": 0.0})
    with pytest.raises(LayoutError, match="eps > 0"):
        load_denoiser(folder)
