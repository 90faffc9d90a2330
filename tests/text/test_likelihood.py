"""Logits, NELBOs and scores of a pipeline against enumeration, plain softmax, and the harness adapter."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cdlm.text.likelihood import ScoredSequence, score_sequences, standard_error
from cdlm.text.pipeline import Pipeline, Sample

from ..writers import Kind, small, write_model

TEXT = "abc"


def any_order(pipe: Pipeline, token_ids: list[int], scored: Sequence[int]) -> float:
    """log p of a masked model, the mean over all orders in which the scored tokens can be revealed, each enumerated."""
    log_law = {}
    for size in range(1, len(scored) + 1):
        for masked in itertools.combinations(scored, size):
            x = torch.tensor([[pipe.mask_token_id if k in masked else token for k, token in enumerate(token_ids)]])
            with torch.no_grad():
                log_law[masked] = pipe.denoiser(x, 0.5)[0]
    orders = list(itertools.permutations(scored))
    total = 0.0
    for order in orders:
        for k, place in enumerate(order):
            total += float(log_law[tuple(sorted(order[k:]))][place, token_ids[place]])
    return total / len(orders)


def uniform_bound(pipe: Pipeline, token_ids: list[int], nodes: int = 24) -> float:
    """Minus the integral over the noise level of the KL of reverse rates, for a single token after a context.

    The chain of the token jumps forward to z at the rate pi / alpha, hence back from z to y at pi / alpha p(y) / p(z).
    """
    v, x0 = pipe.denoiser.vocab, token_ids[-1]
    x = torch.tensor(token_ids).repeat(v, 1)
    x[:, -1] = torch.arange(v)
    node, weight = (torch.tensor(part) for part in _gauss(nodes))
    total = 0.0
    for t, w in zip(node**2, 2 * node * weight, strict=True):
        floor = float(pipe.denoiser.process.noise.alpha(torch.ones(1, dtype=torch.float64)))
        alpha = torch.full((v,), max(float(1 - t), floor), dtype=torch.float64)
        with torch.no_grad():
            law = pipe.denoiser.head(pipe.denoiser.features(x, alpha))[:, -1].exp()
        clean = torch.eye(v, dtype=torch.float64)[x0].expand(v, v)
        true, model = ((1 - t) * p + t / v for p in (clean, law))
        rates = [p / p.diagonal()[:, None] / v / (1 - t) for p in (true, model)]
        gap = (rates[0] * (rates[0] / rates[1]).log() - rates[0] + rates[1]).fill_diagonal_(0).sum(1)
        total += float(w * (true[0] * gap).sum())
    return -total


def _gauss(nodes: int) -> tuple[Sequence[float], Sequence[float]]:
    """Gauss and Legendre's rule on (0, 1), from the eigenvalues of its Jacobi matrix."""
    k = torch.arange(1, nodes, dtype=torch.float64)
    off = k / (4 * k**2 - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return ((values + 1) / 2).tolist(), (vectors[0] ** 2).tolist()


def test_the_nelbo_of_a_masked_model_is_the_mean_over_all_orders() -> None:
    """Each of the 6 subsets of masks, so often that all are known; within four of the errors that it states."""
    pipe = small("masked")
    found = pipe.nelbo(TEXT, likelihood_samples=3000, batch_size=3000)
    assert -found.log_likelihood == pytest.approx(
        -any_order(pipe, list(TEXT.encode()), range(3)), abs=4 * found.standard_error
    )
    assert 0 < found.standard_error < 0.02 * abs(found.log_likelihood)
    assert (found.num_tokens, found.num_bytes, found.exact) == (3, 3, False)


def test_the_nelbo_of_a_uniform_model_is_the_integral_over_time() -> None:
    pipe = small("uniform")
    found = pipe.nelbo("a", likelihood_samples=3000, batch_size=3000)
    assert found.log_likelihood == pytest.approx(uniform_bound(pipe, [97]), abs=4 * found.standard_error)
    assert 0 < found.standard_error < 0.1 * abs(found.log_likelihood)


def test_an_infill_is_scored_given_both_sides() -> None:
    pipe = small("masked", framed=True)
    (one, two) = pipe.score("a___d", ["bc", "x"], likelihood_samples=2000, batch_size=2000)
    ids = [pipe.tokenizer.bos, *b"abcd"]
    assert one.log_likelihood == pytest.approx(any_order(pipe, ids, (2, 3)), abs=4 * one.standard_error)
    exact = any_order(pipe, [pipe.tokenizer.bos, *b"axd"], (2,))
    assert two.log_likelihood == pytest.approx(exact, rel=1e-12)  # one token has one order
    assert two.standard_error == 0
    both = pipe.score("a[MASK]c___", [("b", "d")], likelihood_samples=2000, batch_size=2000)[0]
    assert both.log_likelihood == pytest.approx(any_order(pipe, ids, (2, 4)), abs=4 * both.standard_error)
    assert (both.num_tokens, both.num_bytes) == (2, 2)


def test_an_autoregressive_model_is_exact() -> None:
    """The sum of a softmax written out, for texts of different lengths in one batch, and for one in blocks."""
    pipe = small("causal", length=8)
    bos = pipe.tokenizer.bos

    def log_p(given: bytes, tokens: bytes) -> float:
        with torch.no_grad():
            hidden = pipe.denoiser.features(torch.tensor([[bos, *given, *tokens[:-1]]]), torch.ones(1).double())
            logits = pipe.denoiser.logits(hidden)[0, -len(tokens) :]
        log_law = (logits.exp() / logits.exp().sum(-1, keepdim=True)).log()
        return float(sum(row[token] for row, token in zip(log_law, tokens, strict=True)))

    texts = ["abc", "the cat", "", "z", "a long one"]
    found = pipe.nelbo(texts)
    by_hand = [log_p(b"", text.encode()) for text in texts[:2]] + [0.0, log_p(b"", b"z")]
    by_hand.append(log_p(b"", b"a long ") + log_p(b"ong ", b"one"))
    assert [one.log_likelihood for one in found.per_text] == pytest.approx(by_hand, rel=1e-12)
    assert found.exact
    assert found.standard_error == 0
    assert found.nats_per_token == pytest.approx(-sum(by_hand) / 21)
    (score,) = pipe.score("the___", [" ca"])
    assert score.log_likelihood == pytest.approx(log_p(b"the", b" ca"), rel=1e-12)
    with pytest.raises(ValueError, match="one blank at the end"):
        pipe.score("a ___ cat", ["nice"])


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_a_result_depends_on_the_seed_and_the_text_alone(kind: Kind) -> None:
    pipe, texts = small(kind), ["the cat", "a dog likes the rain and the old sea and some more", "the cat", ""]
    one, many, alone = (pipe.nelbo(texts, 4, batch_size=size) for size in (1, 7, 64))
    for other in (many, alone):
        assert _values(other.per_text) == pytest.approx(_values(one.per_text), rel=1e-12)
    assert _values(pipe.nelbo(texts[1], 4).per_text) == pytest.approx(_values(one.per_text)[1:2], rel=1e-12)
    assert one.per_text[0] == one.per_text[2]
    assert (_values([pipe.nelbo(texts, 4, seed=1)]) == _values([one])) == (kind == "causal")
    twice = 4 * one.per_text[0].standard_error ** 2  # the same estimate twice: its errors add up
    assert one.standard_error**2 == pytest.approx(twice + one.per_text[1].standard_error ** 2)
    assert one.per_text[3].log_likelihood == 0
    assert math.isnan(one.per_text[3].bits_per_byte)


def _values(found: Sequence[object]) -> list[float]:
    return [one.log_likelihood for one in found]


@pytest.mark.parametrize("kind", ["masked", "uniform"])
def test_the_stated_error_is_the_spread_over_seeds(kind: Kind) -> None:
    """300 texts that are one text, each with noise of its own."""
    pipe = small(kind)
    sequence = ScoredSequence.of(list(b"the"), [(0, 3)])
    sequences = [dataclasses.replace(sequence, noise_row=100 * k) for k in range(300)]
    values, errors = torch.tensor(score_sequences(pipe.denoiser, sequences, 16, 0, 600, progress=False)).unbind(1)
    assert 0.85 < float(errors.square().mean().sqrt() / values.std()) < 1.3


@pytest.mark.parametrize("n", [50, 51])
def test_a_trend_over_strata_is_no_error(n: int) -> None:
    assert standard_error(torch.arange(n) / 1000) == pytest.approx(0.001 * math.sqrt(1 / (2 * n)), rel=1e-5)
    noise = torch.randn(1000, n, generator=torch.Generator().manual_seed(0)).double()
    stated = torch.tensor([standard_error(row) for row in noise]).square().mean().sqrt()
    assert float(stated) == pytest.approx(1 / math.sqrt(n), rel=0.04)


@pytest.mark.parametrize("kind", ["masked", "uniform", "causal"])
def test_it_agrees_with_the_harness(kind: Kind) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from cdlm.eval.harness import Harness

    pipe, texts = small(kind), ["the cat sat on a mat, and a dog likes it", "a dog"]
    harness = Harness(pipe, likelihood_samples=4)
    rolling = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts])
    assert _values(pipe.nelbo(texts, 4).per_text) == pytest.approx(rolling, rel=1e-12)
    pairs = harness.loglikelihood([Instance("loglikelihood", {}, ("the cat", end), 0) for end in (" sat", " ran")])
    scores = pipe.score("the cat___", [" sat", " ran"], 4)
    assert _values(scores) == pytest.approx([value for value, _ in pairs], rel=1e-12)


def test_samples_are_scored_by_their_own_tokens() -> None:
    """Also of a padded model, whose infills do not end with its padding."""
    for pipe in (small("masked", "bpe"), small("masked", "bpe", padded=True, framed=True)):
        text = "the ___ sat on [MASK]."
        samples = pipe.infill(text, num_samples=2, span_length=3, steps=4)
        scores = pipe.score(text, samples, 8, span_length=3)
        assert [one.num_tokens for one in scores] == [4, 4]
        assert all(math.isfinite(one.log_likelihood) for one in scores)
        pieces = sum(map(len, ("the ", " sat on ", ".")))
        assert [one.num_bytes for one in scores] == [len(sample.text.encode()) - pieces for sample in samples]
        with pytest.raises(ValueError, match="sample 1 was not generated from this text with span_length=2"):
            pipe.score(text, samples[1:], span_length=2)
    cat = pipe.score("the ___ sat", ["cat"], 8)[0]
    begin, ids = len(pipe.tokenizer.encode("the")) + 1, [pipe.tokenizer.bos, *pipe.tokenizer.encode("the cat sat")]
    padded = ids + [pipe.tokenizer.eos] * (pipe.max_length - len(ids))
    own = range(begin, begin + len(pipe.tokenizer.encode(" cat")))
    assert cat.log_likelihood == pytest.approx(any_order(pipe, padded, own), abs=max(5 * cat.standard_error, 1e-9))
    drawn = Sample(0, "the cat sat", ids, 1)
    assert pipe.score("the ___ sat", drawn, 8, span_length=len(own)) == pipe.score("the ___ sat", "cat", 8) == [cat]


def test_what_cannot_be_scored_is_refused() -> None:
    pipe = small("masked")
    for call, message in (
        (lambda: pipe.score("a ___ b ___", ["x"]), r"has 2 blanks .* fills 1"),
        (lambda: pipe.score("a ___", [""]), "an infill is empty"),
        (lambda: pipe.score("a ___", ["x" * 40]), "has 42 tokens, and .* was trained on 32"),
        (lambda: pipe.score("no blank", ["x"]), "the text has no blanks"),
        (lambda: pipe.nelbo("a", likelihood_samples=1), "at least 2"),
        (lambda: pipe.nelbo("a", batch_size=0), "batch_size must be at least 1"),
        (lambda: pipe.nelbo("a", max_length=0), "max_length must be at least 1"),
        (lambda: dataclasses.replace(pipe, max_length=0).nelbo("a"), "give max_length"),
        (lambda: pipe.log_probs([[1, 2]]), "t must be given"),
        (lambda: pipe.log_probs([[1, 2]], 1.5), "t must be between 0 and 1"),
        (lambda: pipe.log_probs([[1, 258]], 0.5), r"lie in \[0, 258\)"),
        (lambda: pipe.logits([[1, 2], [3]], 0.5), "sequences of one length"),
        (lambda: pipe.logits([[1, 2], [3, 4]], [0.5, 0.5, 0.5]), "one for each of 2 sequences"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_log_probs_are_what_the_objective_sees() -> None:
    pipe, ids = small("masked"), [[97, 257, 99], [257, 257, 98], [97, 98, 99]]
    found = pipe.log_probs(ids, [0.3, 0.9, 0.5], batch_size=2)
    assert pipe.mask_token_id == 257
    assert found.shape == (3, 3, 257)  # no column for the mask
    assert torch.allclose(found.exp().sum(-1), torch.ones(3, 3).double())
    for row, column in ((0, 0), (0, 2), (1, 2), (2, 1)):
        assert found[row, column].exp()[ids[row][column]] == 1  # carried over
    plain = pipe.logits(torch.tensor(ids, dtype=torch.int32), torch.tensor([0.3, 0.9, 0.5]))
    assert torch.allclose(plain.log_softmax(-1)[0, 1], found[0, 1])
    assert not plain.requires_grad
    with torch.no_grad():
        assert torch.allclose(found.exp(), torch.cat([pipe.denoiser(torch.tensor([row]), 0.5) for row in ids]).exp())


@pytest.mark.parametrize("kind", ["uniform", "causal"])
def test_models_without_a_mask(kind: Kind) -> None:
    pipe, ids = small(kind), [[97, 98, 99]]
    t = None if kind == "causal" else 0.5
    assert pipe.mask_token_id is None
    found = pipe.log_probs(ids, t)
    assert torch.allclose(pipe.logits(ids, t).log_softmax(-1), found)
    if kind == "uniform":
        assert not torch.allclose(found, pipe.log_probs(ids, 0.1))
        assert torch.equal(pipe.log_probs(ids, 0.0).argmax(-1), torch.tensor(ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precisions_answer_in_float32(dtype: str, tmp_path: Path) -> None:
    import cdlm

    pipe = cdlm.load(write_model(tmp_path / "model", "masked", length=32), "cpu", "float32")
    if dtype == "bfloat16":
        pipe.denoiser.to(torch.bfloat16)
    truth = small("masked")
    found: Tensor = pipe.log_probs([[257, 98]], 0.5)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), truth.log_probs([[257, 98]], 0.5), atol=1e-4 if dtype == "float32" else 0.1)
    value = pipe.nelbo(TEXT, 8).log_likelihood
    assert value == pytest.approx(truth.nelbo(TEXT, 8).log_likelihood, rel=1e-4 if dtype == "float32" else 0.05)
