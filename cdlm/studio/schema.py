"""What the service takes and gives, as types: its OpenAPI description is made of these."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cdlm.process.order import Order
from cdlm.sample.settings import Confidence, CorrectorKind, Tail

SEEDS = 2**53 - 1
"""The largest that a page can tell apart."""


class Described(BaseModel):
    """The string under a field is its description."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())


class Limits(Described):
    """The most that one request may ask for."""

    steps: int = 1024
    """Denoising steps."""
    length: int = 1024
    """Tokens in a text."""
    n: int = 8
    """Texts."""
    characters: int = 20_000
    """In a prompt, or a text with blanks."""


class Settings(Described):
    """How a text is drawn; `cdlm sample --help` explains each at more length. Where a request is silent, a model's own
    settings hold, if /v1/models tells of any; else these defaults."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, max_length=200)
    """One of /v1/models; the first if not given."""
    n: int = Field(1, ge=1)
    """Texts to write."""
    steps: int | None = Field(None, ge=1)
    """Denoising steps; those that the model writes best with if not given, else 32. Not for autoregressive models."""
    temperature: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    """Below 1 sharpens the predicted law, above 1 flattens it."""
    top_p: float = Field(1.0, ge=0.001, le=1, allow_inf_nan=False)
    """Draw from the smallest set of tokens with this probability."""
    top_k: int = Field(0, ge=0, le=1_000_000)
    """Draw from the k likeliest tokens alone; 0 for all."""
    guidance: float = Field(0.0, ge=0, le=100, allow_inf_nan=False)
    """Sharpens the law relative to what the network says of a blank text; 0 is none. For masked models."""
    cool: float | None = Field(None, ge=0.01, le=100, allow_inf_nan=False)
    """The temperature at the end, reached from `temperature` in a straight line; the same all along if not given."""
    seed: int = Field(0, ge=0, le=SEEDS)
    """The same seed writes the same text."""
    order: Literal[Order, "first-hitting", Confidence] = "random"
    """Which blanks are filled first. random: left to chance, the exact sampler; first-hitting: one token a step;
    dilated, bit-reversed: the tokens of one step lie far apart; probability, margin, entropy-bound: what the model is
    most certain about. For masked models."""
    tail: Tail = "none"
    """One more evaluation after the last step: draw what is left (sample), or take the likeliest (argmax)."""
    corrector: Literal["none", CorrectorKind] = "none"
    """Takes tokens back on the way: constant (Psi), or ReMDM's cap, rescale and loop."""
    eta: float | None = Field(None, ge=0.001, le=1, allow_inf_nan=False)
    """How strongly the corrector acts; 0.05 if not given."""
    stream: bool = False
    """Send every step as a server-sent event."""


class Completion(Settings):
    """Continue a prompt, or write from nothing."""

    prompt: str = ""
    """What the text begins with."""
    max_tokens: int | None = Field(None, ge=2)
    """Tokens of the text, prompt included; the model's own length if not given."""


class Infill(Settings):
    """Fill blanks: in a text (___ or [MASK] or [MASK:5]), or at chosen positions of tokens."""

    text: str | None = None
    """A text with blanks."""
    width: int = Field(4, ge=1, le=1024)
    """Tokens for each ___."""
    tokens: list[int] | None = Field(None, max_length=100_000)
    """Instead of a text: the tokens of one."""
    masked: list[int] | None = Field(None, max_length=100_000)
    """Positions of `tokens` to write anew."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Infill":
        if (self.text is None) == (self.tokens is None) or (self.tokens is None) != (self.masked is None):
            raise ValueError("give a text with blanks, or tokens together with the masked positions")
        return self


class Choice(Described):
    """One text."""

    index: int
    """Its number among the choices."""
    text: str
    """As it reads, what was given included."""
    tokens: list[int]
    """All its tokens as numbers, also the ends of text that fill it up, which `text` leaves out."""
    pieces: list[str]
    """What each of them shows; an end of text is ∎."""
    evaluations: int
    """Passes over the network."""
    entropy: float
    """Of the text's own tokens, in nats; without the ends that fill it up."""
    finish_reason: Literal["length"] = "length"
    """There are always as many tokens as were asked for, ends of text among them."""


class Usage(Described):
    """What it took."""

    prompt_tokens: int
    """Tokens that were given, over all texts."""
    completion_tokens: int
    """Tokens that were written, over all texts."""
    seconds: float
    """From the first evaluation to the last, other texts' turns included."""


class Written(Described):
    """Finished texts."""

    id: str
    """Of the job."""
    object: Literal["text_completion"] = "text_completion"
    """What this is."""
    created: int
    """When it was finished, in seconds since 1970."""
    model: str
    """Who wrote."""
    choices: list[Choice]
    """The texts, as many as `n`."""
    usage: Usage
    """What they took together."""


class ModelCard(Described):
    """A model that writes here."""

    id: str
    """What requests call it."""
    object: Literal["model"] = "model"
    """What this is."""
    method: str
    """How it was trained; empty if its folder does not say."""
    process: str
    """masked, uniform or unigram, or none for an autoregressive model."""
    absorbing: bool
    """Whether all noise is the mask: then its tokens can be filled in an order of choice."""
    has_mask: bool
    """Whether there is a mask, which guidance needs."""
    parameters: int
    """How many numbers the network has."""
    vocab: int
    """Different tokens."""
    length: int
    """Tokens in the texts it was trained on; 0 if its folder does not say."""
    sampling: list[dict[str, int | float | str]]
    """The settings that it writes best with, which hold where a request is silent: those for the nearest number of
    steps, or the first. Empty if its folder does not say."""


class ModelList(Described):
    """The models that write here."""

    object: Literal["list"] = "list"
    """What this is."""
    data: list[ModelCard]
    """One card a model; the first is the one that writes where none is named."""


class Health(Described):
    """How busy the service is."""

    status: Literal["ok"] = "ok"
    """That it answers at all."""
    models: int
    """How many there are."""
    running: int
    """Requests that are written now, in turns."""
    waiting: int
    """Requests that wait for a turn."""
    room: int
    """Requests that may still come to wait."""


class Fault(Described):
    """What went wrong."""

    message: str
    """In a sentence."""
    type: str
    """In a word."""


class Problem(Described):
    """Why a request was not carried out."""

    error: Fault
    """The reason, for people and for programs."""
