"""Masked language models of transformers: the same predictions as there, and everything that our own models do."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cdlm
from cdlm.data.config import PrepareConfig
from cdlm.data.prepare import prepare
from cdlm.data.tokens import open_tokens
from cdlm.methods import METHODS
from cdlm.metrics.likelihood import nelbo
from cdlm.model.pretrained import LayoutError, load_denoiser, read_model_config
from cdlm.text.pipeline import Pipeline
from cdlm.train import train
from cdlm.train.config import TrainConfig
from cdlm.train.recipes import RECIPES

from ..zygote import run
from .backbones import FAMILIES, TEXTS, write_backbone, write_remote

transformers = pytest.importorskip("transformers")

MASKED = [
    slug for slug, method in METHODS.items() if method.process in ("masked", "any mask") and not method.joint_head
]
LENGTH = 16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each family, and one of tokens that its tokenizer has made."""
    root = tmp_path_factory.mktemp("backbones")
    (root / "text.txt").write_text("\n<|endoftext|>\n".join(TEXTS))
    for family in FAMILIES:
        made = prepared(root, write_backbone(root / family, family))
        assert made == root / f"data-{family}"
    return root


def prepared(root: Path, model: Path, **changes: Any) -> Path:
    out = root / f"data-{model.name}"
    options = {"seq_length": LENGTH, "valid_documents": 4, **changes}
    prepare(PrepareConfig((str(root / "text.txt"),), out, tokenizer=str(model), **options))
    return out


def fine_tuning(place: Path, out: Path, family: str, method: str = "mdlm", **changes: Any) -> TrainConfig:
    quick: dict[str, Any] = {"steps": 4, "batch_size": 4, "seq_length": LENGTH, "save_every": 2, "valid_every": 4}
    quick |= {"valid_batches": 1, "valid_samples": 1, "valid_sample_steps": 2, "init_from": place / family}
    quick["data"] = place / f"data-{family}"
    return dataclasses.replace(RECIPES["tiny-mdlm"].config, method=method, out=out, **{**quick, **changes})


def special_ids(pipe: Pipeline) -> set[int]:
    assert pipe.denoiser.process is not None
    return set(pipe.denoiser.process.special)


@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_are_those_of_transformers(place: Path, family: str) -> None:
    """At each mask the softmax of its logits over all tokens but the special ones, between [CLS] and [SEP]."""
    pipe = cdlm.load(place / family, "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / family)
    model = transformers.AutoModelForMaskedLM.from_pretrained(place / family).eval()
    ids = torch.tensor([tokenizer(f"the cat {tokenizer.mask_token} on the {tokenizer.mask_token}.").input_ids])
    masks = ids == tokenizer.mask_token_id
    ours = pipe.log_probs(ids.masked_fill(masks, pipe.mask_token_id), t=0.5)[masks]
    kept = [token for token in range(pipe.denoiser.vocab) if token not in special_ids(pipe)]
    with torch.no_grad():
        theirs = model(ids, attention_mask=torch.ones_like(ids)).logits[masks][:, kept].log_softmax(-1)
    torch.testing.assert_close(ours[:, kept], theirs)
    assert bool((ours.exp()[:, sorted(special_ids(pipe))] == 0).all())
    assert {*tokenizer.all_special_ids, tokenizer.mask_token_id} <= special_ids(pipe)
    assert pipe.tokenizer.bos == tokenizer.cls_token_id
    assert pipe.tokenizer.eos == tokenizer.sep_token_id
    assert pipe.denoiser.linear_head is not None  # the head runs only where it is needed


@pytest.mark.parametrize("family", FAMILIES)
def test_it_samples_infills_rewrites_and_scores_without_special_tokens(place: Path, family: str) -> None:
    pipe = cdlm.load(place / family, "cpu")
    frame = (pipe.tokenizer.bos, pipe.tokenizer.eos)
    assert pipe.max_length == 40
    samples = pipe.sample(4, max_length=12, steps=4, temperature=3.0, prompt="the cat")
    samples += pipe.sample(4, max_length=12, steps=4, guidance=1.0)
    samples += pipe.sample(2, max_length=12, steps=4, order="probability")
    samples += pipe.rewrite("the cat sat on the mat.", 2, steps=4)
    samples += pipe.infill("the ___ sat on the [MASK:2].", 2, steps=4)
    for sample in samples:
        assert (sample.token_ids[0], sample.token_ids[-1]) == frame
        assert not special_ids(pipe) & set(sample.token_ids[1:-1])
    assert all(len(sample.token_ids) == 12 for sample in samples[:10])
    assert samples[0].text.startswith("the cat")
    assert samples[-1].text.startswith("the ")
    assert " sat on the " in samples[-1].text
    assert list(pipe.stream("the cat", max_length=12, steps=3))[-1].texts[0].startswith("the cat")
    found = pipe.nelbo(["the cat sat on the mat.", "a dog"])
    assert 0 < found.nats_per_token < 20
    assert found.num_tokens == sum(len(pipe.tokenizer.encode(text)) for text in ("the cat sat on the mat.", "a dog"))
    likely, other = pipe.score("the ___ sat on the mat.", ["cat", "old dog"])
    assert likely.log_likelihood < 0 > other.log_likelihood


def test_a_likelihood_of_one_token_is_that_of_transformers(place: Path) -> None:
    pipe = cdlm.load(place / "bert", "cpu")
    (found,) = pipe.score("the ___ sat on the mat.", ["cat"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "bert")
    model = transformers.AutoModelForMaskedLM.from_pretrained(place / "bert").eval()
    (cat,) = tokenizer("cat", add_special_tokens=False).input_ids
    ids = tokenizer("the [MASK] sat on the mat.", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits[0, 2].double()
    logits[sorted(special_ids(pipe))] = -torch.inf
    assert found.log_likelihood == pytest.approx(float(logits.log_softmax(-1)[cat]), abs=1e-5)


def test_word_pieces_join_the_text_around_them(place: Path) -> None:
    """The prompt stays as it was typed, though the model reads it in lower case."""
    pipe = cdlm.load(place / "bert", "cpu")
    words = pipe.tokenizer.encode("the cat sat on")
    (template,) = pipe.continuations(["The CAT"], 1, len(words) + 2)
    assert template.text([pipe.tokenizer.bos, *words, pipe.tokenizer.eos], pipe.decode) == "The CAT sat on"
    with pytest.raises(ValueError, match="cannot write '日'"):
        pipe.sample(prompt="日", steps=2)


@pytest.mark.parametrize(
    ("family", "method"), [*(("bert", method) for method in MASKED), ("roberta", "mcdlm"), ("modernbert", "mcdlm")]
)
def test_every_masked_method_trains_it(place: Path, tmp_path: Path, family: str, method: str) -> None:
    """Saved, resumed with the same bits and opened again, without the directory that it came from."""
    config = fine_tuning(place, tmp_path / "run", family, method)
    train(config)
    pipe = cdlm.load(config.out, "cpu")
    assert pipe.denoiser.custom_network == type(load_denoiser(place / family).backbone.network.model).__name__  # type: ignore[union-attr]
    assert (pipe.max_length, pipe.bos_framed, pipe.training["method"]) == (LENGTH, True, method)
    (sample,) = pipe.sample(steps=4)
    assert len(sample.token_ids) == LENGTH
    assert not special_ids(pipe) & set(sample.token_ids[1:-1])
    if method != "mcdlm":
        return
    exported = pipe.save_pretrained(tmp_path / "exported")
    model = transformers.AutoModelForMaskedLM.from_pretrained(exported)
    ids = torch.tensor([[5, 7, 11]])
    network: Any = pipe.denoiser.backbone.network
    torch.testing.assert_close(model(ids).logits, network(ids, torch.zeros(1)))
    tokenizers = [transformers.AutoTokenizer.from_pretrained(path) for path in (exported, place / family)]
    one, other = (words("the cat", return_tensors=None).input_ids for words in tokenizers)
    assert one == other
    assert cdlm.load(exported, "cpu").denoiser.masked_lm["special"] == sorted(special_ids(pipe))  # type: ignore[index]
    with pytest.raises(ValueError, match="holds a model already"):
        pipe.save_pretrained(exported)
    before = {name: tensor.clone() for name, tensor in pipe.denoiser.state_dict().items()}
    assert any(
        not torch.equal(before[name], tensor) for name, tensor in load_denoiser(place / family).state_dict().items()
    )
    shutil.rmtree(config.out / "step-00000004")
    train(dataclasses.replace(config, init_from=tmp_path / "gone"), "auto")  # from step 2
    again = cdlm.load(config.out, "cpu").denoiser.state_dict()
    assert all(torch.equal(before[name], again[name]) for name in before)


def test_training_makes_it_better_and_a_run_can_be_distilled(place: Path, tmp_path: Path) -> None:
    config = fine_tuning(place, tmp_path / "first", "bert", steps=30, batch_size=8, valid_every=0, learning_rate=1e-2)
    valid = [(0, next(iter(open_tokens(config.data, "valid").validation(8, LENGTH))))]
    before = nelbo(load_denoiser(place / "bert"), valid)
    train(config)
    after = nelbo(load_denoiser(config.out), valid)
    assert after < before - 0.3
    second = fine_tuning(place, tmp_path / "second", "bert", "sdtt", init_from=config.out)
    train(second)
    assert nelbo(load_denoiser(second.out), valid) < before - 0.3
    assert cdlm.load(second.out, "cpu").training["from"]["method"] == "mdlm"


def test_the_commands_take_it(place: Path, tmp_path: Path) -> None:
    data, model = place / "data-bert", place / "bert"
    quick = ["--steps", "2", "--batch-size", "2", "--seq-length", "16", "--valid-every", "0", "--valid-samples", "0"]
    start = ["--data", str(data), "--init-from", str(model), "--out", "run"]
    done = run("cdlm", "train", "tiny-mcdlm", *start, *quick, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "try: cdlm sample run" in done.stdout
    done = run("cdlm", "sample", "run", "--steps", "2", "--num-samples", "1", "--json", cwd=tmp_path)
    assert len(json.loads(done.stdout)["token_ids"]) == 16
    texts = f"words={place / 'text.txt'}"
    options = ["--tasks", "likelihood", "--texts", texts, "--num-samples", "4", "--likelihood-samples", "2"]
    options += ["--max-length", "16", "--steps", "2", "--out", "results"]
    done = run("cdlm", "eval", str(model), "run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results" / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(0 < row["nelbo"] < 20 for row in rows)
    assert all(0 < row["few_step"][0]["nelbo"] < 20 for row in rows)  # [SEP] inside a block is given, too


REFUSED = {
    "udlm": "udlm cannot train; use --method with mdlm, mcdlm",
    "duo": "duo cannot train",
    "ar": "ar cannot train",
}


@pytest.mark.parametrize("method", REFUSED)
def test_other_methods_are_refused(place: Path, tmp_path: Path, method: str) -> None:
    with pytest.raises(
        ValueError, match=rf"BertForMaskedLM is a masked language model, which --method {REFUSED[method]}"
    ):
        train(fine_tuning(place, tmp_path / "run", "bert", method))
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_is_one_sentence(place: Path, tmp_path: Path) -> None:
    pipe = cdlm.load(place / "roberta", "cpu")
    with pytest.raises(ValueError, match="41 tokens are more than the 40"):
        pipe.sample(max_length=41, steps=2)
    with pytest.raises(ValueError, match="41 tokens are more than the 40 positions of RobertaForMaskedLM"):
        pipe.log_probs(torch.zeros(1, 41, dtype=torch.long), t=0.5)
    for changes, message in (
        ({"seq_length": 64}, "--seq-length must be at most 40, the positions of BertForMaskedLM"),
        ({"prior": "uniform"}, "which --prior uniform cannot train"),
        ({"optimizer": "muon"}, "use adamw"),
        (
            {"data": place / "data-roberta"},
            "vocabulary of 296, but the model has 62; run cdlm prepare with --tokenizer",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            train(fine_tuning(place, tmp_path / "run", "bert", **changes))
    shutil.copytree(place / "bert", tmp_path / "plain")
    shutil.copyfile(place / "text.txt", tmp_path / "text.txt")
    data = prepared(tmp_path, tmp_path / "plain", packing="plain")
    with pytest.raises(ValueError, match=r"has plain packing; .*--packing wrapped"):
        train(fine_tuning(place, tmp_path / "run", "bert", data=data))


def broken(place: Path, tmp_path: Path, remove: str = "", **changes: Any) -> Path:
    """BERT's directory without a file, or with another config.json."""
    folder = shutil.copytree(place / "bert", tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    if remove:
        (folder / remove).unlink()
    return folder


def test_directories_of_something_else_are_refused(place: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"architectures": ["BertLMHeadModel"]}, "is a causal language model"),
        ({"model_type": "gpt2"}, "is a gpt2 model, which is not a masked language model; .*such as BERT"),
        ({"model_type": "nonsense"}, "of an unknown model_type, 'nonsense'"),
        ({"remove": "tokenizer.json"}, "has no tokenizer.json; write one there with"),
        ({"remove": "tokenizer_config.json"}, "has no mask token: neither its config.json nor its tokenizer"),
        ({"remove": "model.safetensors"}, "has no weights in safetensors"),
    ]
    for changes, message in cases:
        folder = broken(place, tmp_path, **changes)
        with pytest.raises(ValueError, match=message) as caught:
            cdlm.load(folder, "cpu")
        assert "\n" not in str(caught.value)
        shutil.rmtree(folder)
    encoder = transformers.BertModel.from_pretrained(place / "bert")
    folder = shutil.copytree(place / "bert", tmp_path / "encoder")
    encoder.save_pretrained(folder)
    with pytest.raises(LayoutError, match=r"has no weights for cls\.\S+ of BertForMaskedLM"):
        cdlm.load(folder, "cpu")


def test_without_transformers_or_the_hub_it_says_what_is_missing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.modules['transformers'] = None; import cdlm; cdlm.load(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(place / "bert")], capture_output=True, text=True)
    assert (
        "a model of transformers needs transformers; run in the checkout: pip install" in done.stderr.splitlines()[-1]
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no directory nobody/none, and the model hub did not give it either"):
        cdlm.load("nobody/none")
    with pytest.raises(ValueError, match="no directory nobody/none, and the model hub did not give it either"):
        train(fine_tuning(place, tmp_path / "run", "bert", init_from=Path("nobody/none")))


def test_code_of_others_runs_only_where_it_is_trusted(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins for LLaDA and Dream: the same network, whose logits are in place or shifted by one."""
    folders = {kind: write_remote(tmp_path / kind, kind) for kind in ("llada", "Dream")}
    for folder in folders.values():
        with pytest.raises(LayoutError, match=r"runs code of its own .*read it, then add --trust-remote-code"):
            cdlm.load(folder, "cpu")
    assert "REMOTE CODE RUNS" not in capsys.readouterr().out
    llada, dream = (cdlm.load(folder, "cpu", trust_remote_code=True) for folder in folders.values())
    assert "REMOTE CODE RUNS" in capsys.readouterr().out
    mask = read_model_config(folders["llada"])["mask_token_id"]
    assert {mask, 0} <= special_ids(llada)
    assert llada.tokenizer.eos not in special_ids(llada)  # how such models end a text
    ids = torch.tensor([[5, 6, llada.mask_token_id, 7, llada.mask_token_id]])
    torch.testing.assert_close(llada.log_probs(ids, t=0.5), dream.log_probs(ids, t=0.5))
    network: Any = llada.denoiser.backbone.network
    raw = network.model(torch.tensor([[5, 6, mask, 7, mask]])).logits[0, 2]
    kept = [token for token in range(llada.denoiser.vocab) if token not in special_ids(llada)]
    torch.testing.assert_close(llada.log_probs(ids, t=0.5)[0, 2, kept], raw[kept].log_softmax(-1))
    one, other = (pipe.sample(prompt="the cat sat", steps=4, max_length=12)[0].text for pipe in (llada, dream))
    assert one == other

    shutil.copyfile(place / "text.txt", tmp_path / "text.txt")
    data = prepared(tmp_path, folders["llada"])
    config = fine_tuning(place, tmp_path / "run", "bert", "mcdlm", data=data, init_from=folders["llada"])
    with pytest.raises(LayoutError, match="runs code of its own"):
        train(config)
    config = dataclasses.replace(config, trust_remote_code=True)
    train(dataclasses.replace(config, steps=2))
    train(config, "force")
    with pytest.raises(LayoutError, match="runs code of its own"):
        cdlm.load(config.out, "cpu")
    assert cdlm.load(config.out, "cpu", trust_remote_code=True).sample(steps=2, max_length=8)
    shutil.rmtree(folders["llada"])
    with pytest.raises(LayoutError, match=r"the code of this model was in \S+llada, which does not exist"):
        cdlm.load(config.out, "cpu", trust_remote_code=True)
