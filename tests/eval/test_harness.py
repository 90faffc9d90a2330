"""The harness adapter: its bounds against enumeration and quadrature, its requests against plain computation, and
small local tasks through the harness itself."""

import dataclasses
import importlib
import itertools
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cdlm.metrics.conditional import exact_log_likelihood, is_greedy_at_once, log_likelihood_bound
from cdlm.model.denoiser import Denoiser
from cdlm.process import LogLinear, masked, uniform, unigram
from cdlm.process.exact import listed
from cdlm.rng import Rng, seeded
from cdlm.sample.exact import ancestral_law

from ..paper.enumeration import KINDS, PRIORS, VOCAB, tiny
from ..writers import Kind, small

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager

from cdlm.eval.harness import Harness, until_stop

ROOT = Path(__file__).parents[2]
CONTEXT = [2, 0]
TEXT = "the cat sat"


def ask(*arguments: object, kind: str = "loglikelihood") -> Instance:
    return Instance(kind, {}, arguments, 0)


def network(kind: str, told: bool, eps: float = 1e-3) -> Denoiser:
    law, noise = torch.tensor(PRIORS[kind], dtype=torch.float64), LogLinear(eps)
    known = {"masked": masked, "uniform": uniform}
    process = known[kind](VOCAB, noise) if kind in known else unigram(law, VOCAB, noise)
    return tiny(process, seed=3, time_conditioning=told)


def rows_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences that end with tokens to be scored, after the context."""
    scored = torch.arange(len(CONTEXT) + x.shape[1]) >= len(CONTEXT)
    return torch.cat([torch.tensor(CONTEXT).expand(len(x), -1), x], 1), scored.expand(len(x), -1)


def rates(net: Denoiser, x0: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """For every state of the scored tokens, its probability at the noise level t, and the KL of its reverse rates.

    The forward chain jumps to z at the rate pi[z] / alpha (alpha = 1 - t), so the reverse chain jumps from z to y at
    pi[z] / alpha p_t(y) / p_t(z); p_t is known for x0, and predicted by the network.
    """
    process, states = net.process, listed(net.process.states, len(x0))
    full, pi = rows_of(states)[0], process.prior
    alpha = torch.maximum(1 - t, process.noise.alpha(torch.ones(())))
    with torch.no_grad():
        law = net.head(net.features(full, alpha.expand(len(full))))[:, len(CONTEXT) :].exp()
    law = torch.nn.functional.pad(law, (0, process.states - VOCAB))
    clean = torch.eye(process.states, dtype=torch.float64)[x0].expand(len(states), -1, -1)
    jump, found, here = pi[states][..., None] / (1 - t), [], states[..., None]
    for prediction in (clean, law):
        level = (1 - t) * prediction + t * pi
        found.append(torch.where(jump > 0, jump * level / level.gather(-1, here), 0.0))
    p, q = found
    gap = torch.where(p > 0, p * (p / q).log(), 0.0) - p + q
    probability = ((1 - t) * clean + t * pi).gather(-1, here)[..., 0].prod(-1)
    return probability, gap.scatter(-1, here, 0.0).sum((-1, -2))


def gauss() -> list[tuple[Tensor, Tensor]]:
    """Levels and weights of a rule over (0, 1); the integrands have a logarithm at 0, and none in the square root."""
    node, weight = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(60))
    return [(u**2, u * w) for u, w in zip((node + 1) / 2, weight, strict=True)]


def truth(net: Denoiser, x0: Tensor) -> float:
    """The bound on log p(x0 | context): the mean over all states of the KL of rates, integrated over the level."""
    total = 0.0
    for t, w in gauss():
        probability, gap = rates(net, x0, t)
        total += float(w * (probability * gap).sum())
    return -total


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_the_estimates_is_the_bound(kind: str, told: bool) -> None:
    net, x0 = network(kind, told, eps=0.2), torch.tensor([1, 2])
    n = 40_000
    x, scored = rows_of(x0.expand(n, -1))
    rng = seeded(0, kind, batch=n)
    found = log_likelihood_bound(net, x, scored, (torch.arange(n) + rng("u").uniform(1)[:, 0]) / n, rng)
    assert float(found.mean()) == pytest.approx(truth(net, x0), abs=float(4 * found.std() / n**0.5))


@dataclasses.dataclass(frozen=True, eq=False)
class Given(Rng):
    """Noise that is given: every stream is the same table."""

    table: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))

    def uniform(self, columns: int, device: torch.device | str = "cpu", first: int = 0) -> Tensor:
        return self.table[:, :columns]


@pytest.mark.parametrize("kind", ["uniform", "unigram"])
def test_texts_without_noise_have_their_part(kind: str) -> None:
    """Estimates with no noised token, over a fine grid of the noise that decides their level."""
    net, x0, n = network(kind, told=True), torch.tensor([1, 2]), 2000
    x, scored = rows_of(x0.expand(n, -1))
    table = ((torch.arange(n).double() + 0.5) / n)[:, None].repeat(1, x.shape[1])
    found = log_likelihood_bound(net, x, scored, torch.full((n,), 0.1).double(), Given(0, torch.arange(n), n, table))
    place = int(x0 @ torch.tensor([VOCAB, 1]))
    part = sum(float(w * (1 - t) ** 2 * rates(net, x0, t)[1][place]) for t, w in gauss())
    assert float(found.mean()) / 3 == pytest.approx(-part, rel=1e-3)


@pytest.mark.parametrize("l", [1, 3, 4])
def test_under_masking_the_estimates_of_all_orders_add_up_to_the_mean_over_orders(l: int) -> None:
    """One estimate for each number of masks and each order; and the text written token by token in each order."""
    net, x0 = network("masked", told=False), torch.tensor([1, 2, 0, 1])[:l]
    orders = torch.tensor(list(itertools.permutations(range(l))))
    x, scored = rows_of(x0.expand(len(orders) * l, -1))
    table = torch.cat([torch.rand(len(x), len(CONTEXT)).double(), (orders.repeat_interleave(l, 0) + 1.0) / (l + 1)], 1)
    u = (torch.arange(l).repeat(len(orders)) + 0.5) / l
    found = log_likelihood_bound(net, x, scored, u.double(), Given(0, torch.arange(len(x)), len(x), table)).mean()

    total = 0.0
    for order in orders.tolist():
        text, _ = rows_of(torch.full((1, l), VOCAB))
        for place in sorted(range(l), key=lambda i: -order[i]):  # the last to be masked is the first to be written
            with torch.no_grad():
                total += float(net(text, 0.5)[0, len(CONTEXT) + place, x0[place]])
            text[0, len(CONTEXT) + place] = x0[place]
    assert float(found) == pytest.approx(total / len(orders), abs=1e-12)
    assert float(found) == pytest.approx(truth(net, x0), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_lies_below_the_law_of_the_sampler(kind: str) -> None:
    """The law of a sampler in many steps that keeps the context, over all continuations of two tokens."""
    net = network(kind, told=True, eps=1e-6)

    def predict(x_t: Tensor, t: float) -> Tensor:
        with torch.no_grad():
            return net(rows_of(x_t)[0], t)[:, len(CONTEXT) :]

    law = ancestral_law(predict, net.process, 2, torch.linspace(1, 0, 201, dtype=torch.float64))
    below = torch.tensor([truth(net, x0) for x0 in listed(VOCAB, 2)])
    assert float(below.exp().sum()) <= 1
    assert (below <= law.log() + 1e-3).all()
    assert float(below.exp().sum()) > 0.5  # and not by much


def test_a_likely_text_is_one_that_a_single_evaluation_names() -> None:
    net = network("masked", told=False)
    x, scored = rows_of(listed(VOCAB, 2))
    found = is_greedy_at_once(net, x, scored, seeded(0, batch=len(x)))
    with torch.no_grad():
        likeliest = net(rows_of(torch.full((1, 2), VOCAB))[0], 1.0)[0, len(CONTEXT) :].argmax(-1)
    assert found.tolist() == (listed(VOCAB, 2) == likeliest).all(-1).tolist()


def test_an_autoregressive_model_is_scored_exactly() -> None:
    model = small("causal")
    ids = [model.tokenizer.bos, *model.tokenizer.encode(TEXT)]
    law = model.denoiser(torch.tensor([ids[:-1]]))[0]
    each = law.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = Harness(model).loglikelihood([ask("the cat", " sat"), ask("", TEXT), ask("the cat", "")])
    assert [value for value, _ in found] == pytest.approx([float(each[7:].sum()), float(each.sum()), 0.0])
    assert [greedy for _, greedy in found] == [False, False, True]
    likeliest = ids[:1]
    for _ in range(3):
        likeliest.append(int(model.denoiser(torch.tensor([likeliest]))[0, -1].argmax()))
    texts = torch.tensor([likeliest, [*likeliest[:-1], (likeliest[-1] + 1) % 257]])
    assert exact_log_likelihood(model.denoiser, texts, torch.tensor([[False, True, True, True]] * 2))[1].tolist() == [
        True,
        False,
    ]


def test_the_levels_of_a_request_are_stratified() -> None:
    """Two tokens after a context, read twice: once with both masked, once with one of them, and chance says which."""
    model = small("masked")
    ids = torch.tensor(model.tokenizer.encode("catas"))
    masks = torch.tensor([[False, False, False, True, False], [False] * 4 + [True], [False] * 3 + [True] * 2])
    each = model.denoiser(torch.where(masks, 257, ids), 1.0).gather(-1, ids.expand(3, -1)[..., None])[:, 3:, 0]
    either = [float((2 * one + each[2].sum()) / 2) for one in (each[0, 0], each[1, 1])]
    found = {
        Harness(model, likelihood_samples=2, seed=seed).loglikelihood([ask("cat", "as")])[0][0] for seed in range(12)
    }
    assert sorted(found) == pytest.approx(sorted(either))


def alike(some: list[tuple[float, bool]], others: list[tuple[float, bool]]) -> bool:
    """Up to the last digits, which the shape of a batch may change on some CPUs even in double precision."""
    numbers, answers = zip(*some, strict=True)
    return numbers == pytest.approx([value for value, _ in others], rel=1e-12) and answers == tuple(
        greedy for _, greedy in others
    )


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_a_result_depends_on_the_seed_and_the_request_alone(kind: Kind) -> None:
    contexts = ["the", "the", "a dog", "the cat sat on the mat, and then some more of it", ""]
    choices = [" cat", " dog likes", " sat", " on", "the sea"]
    asked = [ask(*pair) for pair in zip(contexts, choices, strict=True)]
    model = small(kind)
    one = Harness(model, likelihood_samples=5, batch_size=1).loglikelihood(asked)
    assert alike(Harness(model, likelihood_samples=5, batch_size=8).loglikelihood(asked[::-1])[::-1], one)
    assert alike(Harness(model, likelihood_samples=5).loglikelihood(asked[2:3]), one[2:3])
    assert alike(Harness(model, likelihood_samples=5, seed=1).loglikelihood(asked), one) == (kind == "causal")
    writing = [ask(context, {"do_sample": True, "max_gen_toks": 8}, kind="generate_until") for context in contexts]
    texts = Harness(model, steps=4, batch_size=1).generate_until(writing)
    assert Harness(model, steps=4).generate_until(writing[::-1]) == [texts[k] for k in (4, 3, 2, 0, 1)]
    assert texts[0] != texts[1]  # asked twice, answered twice
    assert Harness(model, steps=4, seed=1).generate_until(writing) != texts


def test_a_text_is_split_where_its_tokens_are() -> None:
    harness = Harness(small("masked", "bpe"), likelihood_samples=4)
    words = harness.model.tokenizer
    assert len(words.encode(" cat")) == 1
    apart = harness.loglikelihood([ask("the", " cat"), ask("the ", "cat"), ask("the ca", "t")])
    assert alike(apart[:2], apart[1:])
    assert math.isfinite(apart[0][0])
    by_bytes = Harness(small("causal")).loglikelihood([ask("the", " cat"), ask("the ", "cat")])
    assert alike(by_bytes[:1], by_bytes[1:])  # as the harness does it: the space is scored


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_contexts_are_cut_on_the_left_and_that_is_said_once(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    model = small(kind, length=16)
    room = 16 - (kind == "causal")
    harness, context = Harness(model, likelihood_samples=3), "a very long story about a cat"
    with caplog.at_level(logging.WARNING):
        found = harness.loglikelihood([ask(context, " sat"), ask(context[4 - room :], " sat"), ask(context, " ran")])
        writes = {"max_gen_toks": 6, "do_sample": True}
        texts = [
            harness.generate_until([ask(one, writes, kind="generate_until")]) for one in (context, context[6 - room :])
        ]
    assert found[0] == found[1] != found[2]
    assert texts[0] == texts[1]
    assert [record.message.split()[-4:] for record in caplog.records] == [["cut", "on", "the", "left"]]


def test_documents_are_read_in_blocks() -> None:
    """An autoregressive model of 8 tokens: its first one is the start of text, so a block has 7."""
    model = small("causal", length=8)
    bos, ids = model.tokenizer.bos, model.tokenizer.encode("the cat sat on a mat")

    def log_p(given: list[int], tokens: list[int]) -> float:
        law = model.denoiser(torch.tensor([[bos, *given, *tokens[:-1]]]))[0, -len(tokens) :]
        return float(law.gather(-1, torch.tensor(tokens)[:, None]).sum())

    by_hand = log_p([], ids[:7]) + log_p([], ids[7:14]) + log_p(ids[13:14], ids[14:])
    found = Harness(model).loglikelihood_rolling([ask("the cat sat on a mat"), ask("")])
    assert found == pytest.approx([by_hand, 0.0])
    for kind in ("masked", "uniform"):
        (value,) = Harness(small(kind, length=8), likelihood_samples=4).loglikelihood_rolling(
            [ask("the cat sat on a mat")]
        )
        assert -20 * 20 < value < 0


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_texts_end_where_the_task_says(kind: Kind) -> None:
    harness = Harness(small(kind), steps=8)

    def write(**settings: object) -> str:
        (text,) = harness.generate_until([ask("the cat", {"max_gen_toks": 24, **settings}, kind="generate_until")])
        return text

    whole = write(do_sample=True)
    assert len(harness.model.tokenizer.encode(whole)) >= 24 - whole.count("\ufffd")
    stop = whole[len(whole) // 2]
    assert write(do_sample=True, until=[stop, "never there"]) == whole[: whole.index(stop)]
    assert write(do_sample=True, until=stop) == whole[: whole.index(stop)]
    assert write(do_sample=True, temperature=0) == write() == write(temperature=0.0) != whole
    assert write(temperature=1.0) == whole
    assert len(write(max_gen_toks=2)) <= 2
    ends = Harness(small(kind, favour=50.0), steps=8)
    assert ends.generate_until([ask("the cat", {"until": []}, kind="generate_until")]) == [""]


def test_the_first_of_several_strings_ends_a_text() -> None:
    assert until_stop("one. two\nthree", ["\n", "."]) == "one"
    assert until_stop("one", ["", "x"]) == "one"
    assert until_stop("", ["x"]) == ""


def test_settings_that_do_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"max_new_tokens": 4, "num_beams": 3, "until": ["\n"]}
    Harness(small(), steps=2).generate_until([ask("a", settings, kind="generate_until")] * 2)
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["num_beams"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Harness(small(), likelihood_samples=0)
    with pytest.raises(ValueError, match="add max_length="):
        Harness(dataclasses.replace(small(), max_length=0))
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=1"):
        Harness("nowhere", device="cuda:1")
    with pytest.raises(ValueError, match="max_gen_toks must be at least 1"):
        Harness(small()).generate_until([ask("a", {"max_gen_toks": 0}, kind="generate_until")])


def tasks(folder: Path) -> Path:
    """Three tasks over one local file: to choose, to write, to read."""
    lines = [
        {"question": "The cat sat on the", "choices": ["mat", "rain and the sea"], "answer": 0},
        {"question": "A dog likes", "choices": ["xyz", "the old sea"], "answer": 1},
        {"question": "One, two,", "choices": ["three", "four"], "answer": 0},
    ]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"data_files": {"test": str(folder / "lines.jsonl")}, "cache_dir": str(folder / "cache")}
    common = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
    choose = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices"}
    write = {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{choices[answer]}}"}
    read = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"}
    for name, about, metric in (
        ("choose", choose | {"doc_to_target": "answer"}, "acc"),
        ("write", write | {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}}, "exact_match"),
        ("read", read, "byte_perplexity"),
    ):
        task = {"task": f"local_{name}", **common, **about, "metric_list": [{"metric": metric}]}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_local_tasks_run_through_the_harness(kind: Kind, tmp_path: Path) -> None:
    harness = Harness(small(kind), likelihood_samples=4, steps=4)
    names = ["local_choose", "local_write", "local_read"]
    manager = TaskManager(include_path=str(tasks(tmp_path)), include_defaults=False)
    found = simple_evaluate(harness, tasks=names, task_manager=manager, bootstrap_iters=0)
    assert found is not None
    (choose, write, read) = (found["results"][name] for name in names)
    assert choose["acc,none"] in [0, 1 / 3, 2 / 3, 1]
    assert write["exact_match,none"] == 0
    documents = ["The cat sat on the", "A dog likes", "One, two,"]
    nats = -sum(harness.loglikelihood_rolling([ask(document) for document in documents]))
    assert read["byte_perplexity,none"] == pytest.approx(math.exp(nats / sum(map(len, documents))))
    first = found["samples"]["local_choose"][0]
    scored = harness.loglikelihood([ask("The cat sat on the", " mat"), ask("The cat sat on the", " rain and the sea")])
    assert [tuple(part[0]) for part in first["resps"]] == scored
    assert found["config"]["likelihood"] == ("exact" if kind == "causal" else "lower bound, 4 noise levels")


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    """The command of docs/harness.md as it is printed: a bundled model on a local task, offline."""
    page = (ROOT / "docs" / "harness.md").read_text()
    (command,) = (line.split() for line in page.splitlines() if "--tasks agreement" in line)
    assert f"```yaml\n{(ROOT / 'docs' / 'harness' / 'agreement.yaml').read_text()}```" in page
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (row,) = (line.split("|") for line in done.stdout.splitlines() if line.startswith("|agreement"))
    assert row[5].strip() == "acc"
    assert float(row[7]) > 0.5  # of eight easy questions


def test_it_stands_beside_the_harness_s_own_models() -> None:
    assert model_registry.get("cdlm") is Harness
    assert "hf" in model_registry


def test_without_the_harness_there_is_one_line_of_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "cdlm.eval.harness")
    with pytest.raises(ImportError, match=r'pip install .* -e "\.\[harness\]"'):
        importlib.import_module("cdlm.eval.harness")
