"""What the service takes and gives, as types: its OpenAPI description is made of these."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cdlm.sample.confidence import Confidence
from cdlm.sample.correct import Kind
from cdlm.sample.order import Order

SEEDS = 2**53 - 1
"""The largest that a page can tell apart."""


class Limits(BaseModel):
    """The most that one request may ask for."""

    steps: int = 1024
    length: int = 1024
    """Tokens in a text."""
    n: int = 8
    characters: int = 20_000
    """In a prompt, or a text with blanks."""


class Settings(BaseModel):
    """How a text is drawn; `cdlm sample --help` explains each."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = Field(None, max_length=200, description="One of /v1/models; the first if not given.")
    n: int = Field(1, ge=1, description="Texts to write.")
    steps: int | None = Field(
        None, ge=1, description="Denoising steps; 32 if not given. Not for autoregressive models."
    )
    temperature: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, ge=0.001, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=0, le=1_000_000)
    guidance: float = Field(0.0, ge=0, le=100, allow_inf_nan=False, description="Masked models; 0 is none.")
    cool: float | None = Field(
        None, ge=0.01, le=100, allow_inf_nan=False, description="The temperature at t = 0, reached in a straight line."
    )
    seed: int = Field(0, ge=0, le=SEEDS, description="The same seed writes the same text.")
    order: Literal[Order, "first-hitting", Confidence] = "random"
    tail: Literal["none", "sample", "argmax"] = "none"
    corrector: Literal["none", Kind] = "none"
    eta: float | None = Field(None, ge=0.001, le=1, allow_inf_nan=False)
    stream: bool = Field(False, description="Send every step as a server-sent event.")


class Completion(Settings):
    """Continue a prompt, or write from nothing."""

    prompt: str = ""
    max_tokens: int | None = Field(
        None, ge=2, description="Tokens of the text, prompt included; the model's own length."
    )


class Infill(Settings):
    """Fill blanks: in a text (___ or [MASK] or [MASK:5]), or at chosen positions of tokens."""

    text: str | None = None
    width: int = Field(4, ge=1, le=1024, description="Tokens for each ___.")
    tokens: list[int] | None = Field(None, max_length=100_000)
    masked: list[int] | None = Field(None, max_length=100_000, description="Positions of `tokens` to write anew.")

    @model_validator(mode="after")
    def _one_kind(self) -> "Infill":
        if (self.text is None) == (self.tokens is None) or (self.tokens is None) != (self.masked is None):
            raise ValueError("give a text with blanks, or tokens together with the masked positions")
        return self


class Choice(BaseModel):
    index: int
    text: str
    tokens: list[int]
    pieces: list[str]
    """The text, token by token."""
    evaluations: int
    """Passes over the network."""
    entropy: float
    """Of the text's own tokens, in nats."""
    finish_reason: Literal["length"] = "length"


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    seconds: float


class Written(BaseModel):
    """Finished texts."""

    model_config = ConfigDict(protected_namespaces=())

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    method: str
    process: str
    parameters: int
    vocab: int
    length: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    models: int
    running: int
    waiting: int
    room: int


class Fault(BaseModel):
    message: str
    type: str


class Problem(BaseModel):
    """Why a request was not carried out."""

    error: Fault
