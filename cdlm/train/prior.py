"""The process that a run trains on: the method's own, or one with the prior that `--prior` names."""

import dataclasses

import torch
from torch import Tensor

from cdlm.data.tokens import open_tokens
from cdlm.methods import Method
from cdlm.methods.spec import parse_method
from cdlm.process import SCHEDULES, Process, masked, uniform, unigram
from cdlm.train.config import TrainConfig, parse_prior


def make_process(config: TrainConfig, method: Method, vocab: int, saved: Tensor | None = None) -> Process | None:
    """The process of a run; None for an autoregressive one. A resumed run has a `saved` unigram prior."""
    if config.noise_schedule not in SCHEDULES:
        raise ValueError(
            f"--noise-schedule must be one of {', '.join(SCHEDULES)} (got {config.noise_schedule!r}); your own is "
            "known where the file that adds it to SCHEDULES is run (docs/extend.md)."
        )
    process = method.default_process(vocab)
    kind, mask_probability = parse_prior(config.prior)
    if kind == "masked":
        process = masked(vocab)
    elif kind == "uniform":
        process = uniform(vocab)
    elif kind == "mixed":
        process = mixed(vocab, mask_probability)
    elif kind == "unigram":
        process = Process(vocab, saved if saved is not None else token_frequencies(config, vocab))
    if process is None:
        return None
    return dataclasses.replace(process, noise=SCHEDULES[config.noise_schedule]())


def check_prior(config: TrainConfig) -> None:
    """Refuse a prior that the method does not fit, before any data is read."""
    method, choices = parse_method(config.method)
    frequencies = torch.tensor([0.75, 0.25], dtype=torch.float64)
    method(make_process(config, method, vocab=2, saved=frequencies), config.steps, **choices)


def same_prior(given: Process | None, process: Process | None) -> bool:
    """Whether two processes of the same kind have the same prior; uniform ones may differ in the padding of the
    vocabulary."""
    if given is None or process is None or process.flat:
        return True
    return torch.equal(given.prior, process.prior)


def mixed(vocab: int, mask_probability: float) -> Process:
    """A prior that is the mask with this probability, and otherwise a uniform token."""
    token_probability = (1 - mask_probability) / vocab
    prior = torch.full((vocab + 1,), token_probability, dtype=torch.float64)
    prior[-1] = mask_probability
    return unigram(prior, vocab)


def token_frequencies(config: TrainConfig, vocab: int) -> Tensor:
    """The distribution of the tokens of the training split, each counted once more so that none has probability 0."""
    counts = open_tokens(config.data, "train").token_counts() + 1
    if len(counts) != vocab:
        raise ValueError(f"{config.data} has a vocabulary of {len(counts)} tokens, but the model has {vocab}")
    return counts.double() / counts.sum()
