"""Requests and responses of the service, as types: its OpenAPI description is made of them.

Those of /v1/completions and /v1/models are OpenAI's, with fields of our own beside them. The settings of the sampler
are derived from `cdlm.sample.settings`, so that a new one is described, checked and shown in the form of the page
without a change of this package.
"""

from typing import Annotated, Any, Literal

from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, create_model, model_validator

from cdlm.sample.settings import SPECS, choices, setting_type

MAX_SEED = 2**53 - 1
"""The largest integer that JavaScript represents exactly."""


class Described(BaseModel):
    """The docstring of a field is its description."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())


def _setting_field(name: str) -> Any:
    """The type and description of a setting; None means that it is not given."""
    spec, kind = SPECS[name], setting_type(name)
    if kind in (int, float):
        kind = Annotated[kind, Field(ge=spec.minimum, gt=spec.above, le=spec.maximum)]
        if setting_type(name) is float:
            kind = Annotated[kind, AllowInfNan(False)]
    elif not choices(name):
        kind = Annotated[kind, Field(max_length=10_000)]
    extra = {"x-default": spec.default}
    if spec.requires:
        extra["x-requires"] = spec.requires
    return kind | None, Field(None, description=spec.help.replace("--", ""), json_schema_extra=extra)


Settings = create_model(
    "Settings",
    __base__=Described,
    __doc__="The settings of the sampler. One that is not given, or null, comes from the model's generation config, "
    "else it is `x-default`. `x-requires` names the capability in a model card that any other value needs.",
    **{name: _setting_field(name) for name in SPECS},
)


class SettingsRequest(Settings):
    """Settings to complete and check, without generating anything."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, max_length=200)
    """A model of /v1/models; the first if not given."""


class StreamOptions(Described):
    """What a stream says besides the text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    """End with a chunk that has the `usage` of the whole request and no choices."""


class GenerationRequest(SettingsRequest):
    """What all requests for samples have in common. A field that is null is as good as not given."""

    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: Annotated[float, Field(ge=0, le=SPECS["temperature"].maximum), AllowInfNan(False)] | None = Field(
        None, json_schema_extra={"x-default": SPECS["temperature"].default}
    )
    """Below 1 sharpens the predicted distribution; 0 is greedy, as is `top_k` 1."""
    n: int | None = Field(None, ge=1)
    """Samples to generate for each prompt; 1 if not given."""
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """The same seed generates the same samples; a random one if not given, which the response names."""
    stream: bool | None = None
    """Send the text as server-sent events, as far as it is final."""
    stream_options: StreamOptions | None = None
    """Only together with `stream`."""
    stream_drafts: bool | None = None
    """With `stream`: also send the state after every step, as the `draft` of a choice (an extension)."""

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> "GenerationRequest":
        if not self.stream and (self.stream_options is not None or self.stream_drafts):
            raise ValueError("stream_options and stream_drafts apply to a stream; set stream to true, too.")
        return self


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=100_000)]
Stop = Annotated[str, Field(min_length=1, max_length=1_000)]


class Completion(GenerationRequest):
    """Continue prompts, fill the gap before a suffix, or generate unconditionally: OpenAI's request, and the settings
    of the sampler."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=1_000)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=1_000)]
        | None
    ) = None
    """The beginning of the text, as a string or as token ids; or a list of several. Unconditional samples if not given
    or empty."""
    suffix: str | None = None
    """The end of the text: `max_tokens` tokens are filled in between the prompt and the suffix."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens to generate, the prompt excluded; 16 if neither this nor `max_length` is given."""
    max_length: int | None = Field(None, ge=2)
    """Instead of `max_tokens`: tokens in a sample, the prompt included (an extension)."""
    stop: Stop | Annotated[list[Stop], Field(min_length=1, max_length=4)] | None = None
    """Up to four strings; a sample ends before the first occurrence of any of them."""
    echo: bool | None = None
    """Begin `text` with the prompt."""
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100), AllowInfNan(False)]], Field(max_length=10_000)]
        | None
    ) = None
    """What is added to the logits of tokens, by token id, from -100 to 100."""
    best_of: int | None = Field(None, ge=1)
    """Only the value of `n`: there are no other samples to choose from."""
    logprobs: int | None = Field(None, ge=0, le=5)
    """Not supported, since no token has a probability given those before it alone: only null is accepted."""
    user: str | None = Field(None, max_length=1_000)
    """Whom the request is for; it has no effect."""


class Infill(GenerationRequest):
    """Fill the blanks of a text (___ or [MASK] or [MASK:5]), or chosen positions of a sequence of tokens."""

    text: str | None = None
    """A text with blanks."""
    span_length: int = Field(4, ge=1, le=1024)
    """Tokens that each ___ stands for."""
    token_ids: list[int] | None = Field(None, max_length=100_000)
    """Instead of a text: the tokens of an earlier sample."""
    masked_positions: list[int] | None = Field(None, max_length=100_000)
    """Positions in `token_ids` to generate again."""

    @model_validator(mode="after")
    def _text_or_tokens(self) -> "Infill":
        both = self.token_ids is not None and self.masked_positions is not None
        neither = self.token_ids is None and self.masked_positions is None
        if (self.text is None and not both) or (self.text is not None and not neither):
            raise ValueError("give a text with blanks, or token_ids together with masked_positions.")
        return self


class SudokuRequest(SettingsRequest):
    """Generate Sudoku grids, or fill the empty cells of a puzzle, and report every step."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, max_length=200)
    """A model of /v1/sudoku/models; the first of this size if not given."""
    size: Literal[4, 6, 9] | None = None
    """The side of the grid; that of the puzzle or of the model if not given."""
    puzzle: str | None = Field(None, max_length=1_000)
    """The givens row by row, with . for an empty cell; an empty grid if not given."""
    n: int | None = Field(None, ge=1)
    """Grids to generate; 1 if not given."""
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """The same seed generates the same grids; a random one if not given, which the response names."""


class Limits(Described):
    """The most that one request may ask for."""

    max_steps: int = 1024
    """Denoising steps."""
    max_length: int = 1024
    """Tokens in a sample."""
    max_samples: int = 8
    """Samples."""
    max_characters: int = 20_000
    """Characters in a prompt with its suffix, or in a text with blanks."""


class ResolvedSettings(Described):
    """The complete settings of a call."""

    model: str
    """The model."""
    settings: dict[str, int | float | str | None]
    """Every setting that the sampler reads."""
    summary: str
    """The same in words: the steps, the precision, and whatever is not the default."""
    sources: dict[str, str]
    """Where each of them comes from: given, generation config, or default."""
    ignored: list[str]
    """Given settings that do not apply to the model or to its sampler; a request for samples must leave them out."""
    available: list[str]
    """Settings that can be changed, the others staying as they are."""
    choices: dict[str, list[str]]
    """For each setting with a choice, the values that a sampler of the model takes together with the given settings."""


class Choice(Described):
    """One sample. `token_ids` and what follows are extensions of OpenAI's response."""

    index: int
    """Its number: those of the first prompt come first."""
    text: str
    """The generated text, up to its end or the first stop string; with `echo` the prompt comes first. A response of
    /v1/infill has the whole text."""
    logprobs: None = None
    """Always null."""
    finish_reason: Literal["stop", "length"]
    """Whether `text` ended before all `max_tokens` tokens, at a stop string or an EOS token."""
    token_ids: list[int]
    """All tokens, those of the prompt and those that `text` leaves out included."""
    pieces: list[str]
    """The text of each token; an EOS token is shown as ∎."""
    nfe: int
    """Number of network evaluations."""
    entropy: float
    """Of its unigram distribution in nats, without EOS padding."""


class Usage(Described):
    """What a request took."""

    prompt_tokens: int
    """Tokens that were given, with a suffix and a BOS token; each prompt counts once."""
    completion_tokens: int
    """Tokens that were generated, over all samples; also those behind the end of a text."""
    total_tokens: int
    """Both together."""
    seconds: float
    """From the first network evaluation to the last, including the turns of other requests (an extension)."""


class CompletionResponse(Described):
    """Finished samples."""

    id: str
    """The id of the job."""
    object: Literal["text_completion"] = "text_completion"
    """The type of this object."""
    created: int
    """When the request was accepted, in seconds since 1970."""
    model: str
    """The model that generated them."""
    seed: int
    """The seed that generates them again (an extension)."""
    choices: list[Choice]
    """The samples, `n` for each prompt."""
    usage: Usage
    """What they took together."""


class ModelCard(Described):
    """A model of this service. `method` and what follows are extensions of OpenAI's response."""

    id: str
    """Its name in requests."""
    object: Literal["model"] = "model"
    """The type of this object."""
    created: int
    """When its directory was written, in seconds since 1970."""
    owned_by: Literal["cdlm"] = "cdlm"
    """Always cdlm."""
    method: str
    """The method it was trained with; empty if its directory does not say."""
    process: str
    """masked, uniform or unigram; none for an autoregressive model."""
    absorbing: bool
    """Whether all noise is the mask token, so that an unmasking order can be chosen."""
    has_mask: bool
    """Whether there is a mask token, which guidance requires."""
    num_parameters: int
    """Parameters of the network."""
    vocab_size: int
    """Tokens in the vocabulary."""
    max_length: int
    """Tokens in the sequences it was trained on; 0 if its directory does not say."""
    generation_config: dict[str, Any]
    """The settings that hold where a request gives none, with `step_presets` for different numbers of steps."""


class ModelList(Described):
    """The models of this service."""

    object: Literal["list"] = "list"
    """The type of this object."""
    data: list[ModelCard]
    """The models; the first is used where a request names none."""


class Health(Described):
    """How busy the service is."""

    status: Literal["ok"] = "ok"
    """Always ok."""
    models: int
    """Number of models."""
    running: int
    """Requests that are computed now, in turns."""
    queued: int
    """Requests that wait for a turn."""
    available: int
    """Places left in the queue."""


class GridModel(Described):
    """A model that generates Sudoku grids."""

    model: str
    """Its name in requests; `exact` is the exact denoiser of uniform grids."""
    size: int
    """The side of its grids: 4, 6 or 9."""


class GridModelList(Described):
    """The models that generate Sudoku grids."""

    object: Literal["list"] = "list"
    """The type of this object."""
    data: list[GridModel]
    """Trained models first; for each size, the first is used where a request names none."""


class Grid(Described):
    """A generated grid, and how it came about."""

    index: int
    """Its number."""
    states: list[str]
    """The cells at first and after each step, row by row: a digit, . for an empty cell, or ? for another token."""
    conflicts: list[list[int]]
    """For each state, the cells whose digit is in the same row, column or box again, or which hold no digit."""
    steps: list[int]
    """For each cell, the step that gave it its last value; 0 if it had that from the start."""
    valid: bool
    """Whether every row, column and box has every digit once."""
    nfe: int
    """Number of network evaluations."""


class SudokuResponse(Described):
    """Sudoku grids, step by step."""

    id: str
    """The id of the job."""
    object: Literal["sudoku"] = "sudoku"
    """The type of this object."""
    created: int
    """When the request was accepted, in seconds since 1970."""
    model: str
    """The model that generated them."""
    size: int
    """The side of the grids."""
    puzzle: str | None
    """The givens, with . for an empty cell; null if there were none."""
    seed: int
    """The seed that generates them again."""
    summary: str
    """The settings in words."""
    grids: list[Grid]
    """The grids."""
    valid: int
    """How many of them are valid."""
    distinct: int
    """How many different ones there are among the valid ones."""


class ErrorDetail(Described):
    """What went wrong."""

    message: str
    """In a sentence."""
    type: str
    """invalid_request_error, rate_limit_error, or server_error."""
    param: str | None = None
    """The field of the request that it is about, where that is known."""
    code: str | None = None
    """In a word, where there is one."""


class ErrorResponse(Described):
    """Why a request was refused."""

    error: ErrorDetail
    """The reason."""
