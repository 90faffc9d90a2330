"""Anything may stand in a file or on the command line: there is a result, or a line that explains; never a stack trace.

Commands run as they do for users, through `cdlm.__main__`, in this process. Examples are the same in every run.
"""

import contextlib
import io
import json
import math
import pickle
import random
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from cdlm.__main__ import main
from cdlm.data.tokenizer import Tokenizer
from cdlm.data.tokens import open_tokens
from cdlm.eval.results import read_rows, read_samples
from cdlm.files import read_object
from cdlm.methods import METHODS
from cdlm.methods.spec import parse_method
from cdlm.model.config import NetworkConfig
from cdlm.model.denoiser import Denoiser
from cdlm.model.pretrained import LayoutError, load_denoiser, save_denoiser
from cdlm.process import Process, masked
from cdlm.rng import seeded
from cdlm.text.template import OPEN, infilling
from cdlm.train.config import TrainConfig, from_json, to_json

EXPLAINED = (ValueError, OSError, FloatingPointError)
quick = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

numbers = st.floats(allow_subnormal=False)  # which this process flushes to zero
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), numbers, st.text(max_size=8), st.sampled_from([10**400, 2**63, -1, ""])
)
values = st.recursive(
    scalars, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3)
)


def cdlm(*arguments: object) -> tuple[int, str]:
    """The exit status and everything printed of `cdlm ...`."""
    out = io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["cdlm", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        try:
            main()
        except SystemExit as end:
            if isinstance(end.code, str):
                return 1, out.getvalue() + end.code
            return end.code or 0, out.getvalue()
    return 0, out.getvalue()


def explained(*arguments: object) -> str:
    """The words of a command that cannot succeed."""
    status, text = cdlm(*arguments)
    assert status in (1, 2), (status, text)
    assert "Traceback" not in text
    assert len(text.strip()) > 10, text
    return text


@contextlib.contextmanager
def only_explained() -> Iterator[None]:
    """A result or an error with words; every other exception fails the test."""
    caught: list[Exception] = []
    try:
        yield
    except EXPLAINED as error:
        caught.append(error)
    assert all(len(str(error)) > 5 for error in caught), caught


def torn(data: bytes, draw: random.Random) -> bytes:
    """A file with a stretch changed, cut out, doubled or put in from elsewhere."""
    at, size = draw.randrange(len(data) + 1), draw.choice((1, 2, 8, 60))
    new = draw.choice((b"", draw.randbytes(size), data[at : at + size] * 2, b"9" * size, b"[" * size, b"-", b"\0"))
    return data[:at] + new + data[at + draw.choice((0, size)) :]


seeds = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def model(work: Path) -> Path:
    """A model folder of ours with its tokenizer."""
    torch.manual_seed(0)
    shape = NetworkConfig(hidden_size=16, num_layers=1, num_heads=2, cond_dim=8)
    Tokenizer.load("bytes").save(save_denoiser(Denoiser(shape, masked(257)), work / "model") / "tokenizer.json")
    return work / "model"


FIELDS = sorted(to_json(TrainConfig()))


@quick
@given(st.dictionaries(st.sampled_from([*FIELDS, "metod"]), values, max_size=4))
def test_any_settings(changes: dict) -> None:
    with only_explained():
        config = from_json({**to_json(TrainConfig()), **changes})
        assert from_json(json.loads(json.dumps(to_json(config)))) == config


@quick
@given(st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=3), seeds)
def test_any_run_json_on_the_command_line(work: Path, changes: dict, seed: int) -> None:
    """There are no tokens at its path, so each of them must be refused; most long before."""
    text = json.dumps({**to_json(TrainConfig(device="cpu", data=work / "no data", out=work / "no run")), **changes})
    (work / "run.json").write_bytes(torn(text.encode(), random.Random(seed)) if seed % 2 else text.encode())
    explained("train", work / "run.json", "--data", work / "no data", "--out", work / "no run")


@quick
@given(seeds)
def test_any_meta_json(work: Path, corpus: Path, seed: int) -> None:
    folder = work / "tokens"
    if not folder.exists():
        shutil.copytree(corpus, folder)
    (folder / "meta.json").write_bytes(torn((corpus / "meta.json").read_bytes(), random.Random(seed)))
    with only_explained():
        file = open_tokens(folder)
        assert file.batch(0, 0, 2).max() < file.meta.vocab


@quick
@given(st.sampled_from(("vocab", "eos", "bos", "length", "dtype", "packing", "splits", "version", "sources")), values)
def test_any_value_in_meta_json(work: Path, corpus: Path, field: str, value: object) -> None:
    folder = work / "tokens2"
    if not folder.exists():
        shutil.copytree(corpus, folder)
    fields = json.loads((corpus / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**fields, field: value}))
    with only_explained():
        file = open_tokens(folder)
        assert 0 <= file.meta.bos < file.meta.vocab
        assert file.read(torch.tensor([0])).max() < file.meta.vocab


@pytest.fixture(scope="module")
def bpe(work: Path) -> bytes:
    tokenizer = Tokenizer.train(["some words and some more words"] * 20, 300)
    return tokenizer.save(work / "bpe.json").read_bytes()


@quick
@given(seeds)
def test_any_tokenizer_json(work: Path, bpe: bytes, seed: int) -> None:
    draw = random.Random(seed)
    (work / "any.json").write_bytes(torn(torn(bpe, draw), draw))
    with only_explained():
        tokenizer = Tokenizer.load(work / "any.json")
        assert 0 <= tokenizer.eos < tokenizer.vocab_size


@quick
@given(st.dictionaries(st.sampled_from(("format", "version", "model", "added_tokens", "truncation")), values))
def test_any_fields_of_a_tokenizer_json(work: Path, fields: dict) -> None:
    (work / "some.json").write_text(json.dumps(fields))
    with only_explained():
        Tokenizer.load(work / "some.json")
    (work / "some.json").write_text(json.dumps({"format": "cdlm-bytes", **fields}))
    with only_explained():
        Tokenizer.load(work / "some.json")


marks = st.lists(st.sampled_from(["___", "[MASK]", "[MASK:3]", "[MASK:0]", "[MASK:", "]", " ", "word", "\ud800", "é"]))


@quick
@given(st.one_of(st.text(max_size=30), marks.map("".join)), st.integers(-1, 5))
def test_any_text_with_blanks(text: str, width: int) -> None:
    """Whatever is given stays, and every span is where it was marked."""
    tokenizer = Tokenizer.load("bytes")
    with only_explained():
        template = infilling(text, tokenizer, width)
        assert template.token_ids.count(OPEN) == sum(end - begin for begin, end in template.spans)
        filled = template.text([ord("x") if i == OPEN else i for i in template.token_ids], tokenizer.decode)
        assert all(piece in filled for piece in template.pieces)


@settings(quick, max_examples=12)
@given(st.text(max_size=12), st.text(max_size=12))
def test_any_infill_on_the_command_line(model: Path, before: str, after: str) -> None:
    status, text = cdlm("sample", model, f"--infill={before}___{after}", "--num-samples", "1", "--steps", "1", "--json")
    assert "Traceback" not in text
    if status == 0:
        found = json.loads(text.splitlines()[0])["text"]
        assert found.startswith(before.rstrip("_")) or "___" in before + "___"
    else:
        assert "cdlm:" in text


@pytest.mark.parametrize("wide", ["0", "9" * 30, "9" * 5000])
def test_a_blank_as_wide_as_a_number_can_say(model: Path, wide: str) -> None:
    assert "a blank must have between 1 and" in explained("sample", model, "--infill", f"a [MASK:{wide}] b")


@quick
@given(seeds)
def test_any_safetensors(work: Path, model: Path, seed: int) -> None:
    """The header is a length and JSON: change both, and the numbers."""
    draw, folder = random.Random(seed), work / "spoilt"
    if not folder.exists():
        shutil.copytree(model, folder)
    data = (model / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    head, body = data[8 : 8 + size], data[8 + size :]
    length = draw.choice((size, size, size + 1, 0, 2**63, 2**64 - 1, 10**8))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + torn(head, draw) + body)
    with only_explained():
        load_denoiser(folder)


@quick
@given(st.dictionaries(st.sampled_from(("version", "vocab_size", "process", "network", "format")), values, min_size=1))
def test_any_config_of_a_model(work: Path, model: Path, changes: dict) -> None:
    folder = work / "spoilt2"
    if not folder.exists():
        shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with only_explained():
        load_denoiser(folder)


@quick
@given(st.sampled_from(sorted(vars(NetworkConfig()))), scalars)
@example("cond_dim", 100_000)  # 40 GB, if it were built
def test_any_architecture_of_a_model(work: Path, model: Path, field: str, value: object) -> None:
    folder = work / "spoilt3"
    if not folder.exists():
        shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text())
    config["network"][field] = value
    (folder / "config.json").write_text(json.dumps(config))
    with only_explained():
        load_denoiser(folder)


@settings(quick, max_examples=30)
@given(seeds)
def test_any_results(work: Path, seed: int) -> None:
    """Torn results and texts: read, or named with the line."""
    draw = random.Random(seed)
    rows = [json.dumps({"task": "unconditional", "model": f"m{k}", "num": k, "ppl": 1.5}) for k in range(4)]
    (work / "results.jsonl").write_bytes(torn("\n".join([*rows, ""]).encode(), draw))
    with only_explained():
        read_rows(work)
    lines = [json.dumps({"cell": {"model": "m"}}), json.dumps({"index": 0, "text": "a"}), ""]
    (work / "samples.jsonl").write_bytes(torn("\n".join(lines).encode(), draw))
    with only_explained():
        read_samples(work / "samples.jsonl")


words = st.sampled_from(sorted({"x", *(choice for method in METHODS.values() for choice in method.choices)}))
given_values = st.sampled_from(["0", "1", "0.2", "-1", "nan", "inf", "1e400", "staged", "true", "", "9" * 40, "jsd"])


@settings(quick, max_examples=200)
@given(st.sampled_from([*METHODS, "mcdm", ""]), st.lists(st.tuples(words, given_values), max_size=3), seeds)
def test_any_method(slug: str, choices: list[tuple[str, str]], seed: int) -> None:
    """What is accepted can be built and asked for its schedules at any step."""
    spec = slug + ":" * bool(choices) + ",".join(f"{name}={value}" for name, value in choices)
    with only_explained():
        method, found = parse_method(spec)
        objective = method(method.default_process(7), 100, **found)
        for step in (0, 50, 99):
            assert all(math.isfinite(term.share(step / 100)) for term in objective.terms)
            assert 0 <= objective.lam(step) <= 1


@settings(quick, max_examples=20)
@given(st.text(max_size=20), st.sampled_from(("train", "plot", "sample", "cost", "prepare", "report", "eval", "")))
def test_any_words_on_the_command_line(work: Path, text: str, name: str) -> None:
    explained(*filter(None, [name]), f"{work}/{text.replace(chr(0), '')}/nothing", "--no-such-flag")


@quick
@given(
    st.integers(-2, 9),
    st.lists(st.floats(-1, 2, allow_subnormal=False) | st.sampled_from([math.nan, math.inf, 1.0, 0.5]), max_size=10),
    numbers | st.floats(0, 1, allow_subnormal=False),
    st.integers(0, 3),
)
def test_any_process(vocab: int, prior: list[float], t: float, length: int) -> None:
    """Vocabularies, priors, times and lengths: a state of the process, or an error with words."""
    with only_explained():
        process = Process(vocab, torch.tensor(prior, dtype=torch.float64))
        rng = seeded(0, batch=2)
        x0 = torch.zeros(2, length, dtype=torch.long)
        x = process.corrupt(x0, torch.full((2,), t, dtype=torch.float64), rng)
        assert x.shape == x0.shape
        assert bool(((x >= 0) & (x < process.states)).all())


@pytest.mark.parametrize("depth", [10, 10_000, 200_000])
def test_json_nested_without_end(depth: int, work: Path) -> None:
    (work / "deep.json").write_text("[" * depth)
    with pytest.raises(ValueError, match=r"deep\.json is not valid JSON"):
        read_object(work / "deep.json")
    explained("train", work / "deep.json")


def test_weights_of_another_kind_are_refused(work: Path, model: Path) -> None:
    """Integers, or numbers that are none, in place of weights."""
    from safetensors.torch import load_file

    tensors = load_file(model / "model.safetensors")
    folder = Path(shutil.copytree(model, work / "kinds"))
    name = "backbone.output_layer.linear.bias"
    save_file({**tensors, name: torch.full_like(tensors[name], math.nan)}, folder / "model.safetensors")
    with pytest.raises(LayoutError, match=rf"{name}' holds numbers that are not finite"):
        load_denoiser(folder)


class Trap:
    """Whoever unpickles this leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "modeling_cdlm.py"])
def test_nothing_in_a_model_folder_is_unpickled_or_run(name: str, model: Path, tmp_path: Path) -> None:
    """Weights that are a pickle, in either place, and code beside them: an error or a text, and no mark."""
    folder, mark = Path(shutil.copytree(model, tmp_path / "model")), tmp_path / "mark"
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n".encode()
    (folder / name).write_bytes(code if name.endswith(".py") else pickle.dumps(Trap(mark)))
    status, said = cdlm("sample", folder, "--num-samples", 1, "--steps", 2, "--max-length", 8, "--device", "cpu")
    assert not mark.exists()
    assert status == (0 if name.endswith(".py") else 1), said
    assert "Traceback" not in said
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()  # the trap works
