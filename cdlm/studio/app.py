"""The HTTP service of the studio: JSON and server-sent events, and the files of the page."""

import asyncio
import contextlib
import enum
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cdlm.files import VERSION
from cdlm.methods.spec import method_name
from cdlm.studio.generation import CheckedRequest, Progress, Result, check_request, generation_events
from cdlm.studio.jobs import Job, JobQueue, QueueFull
from cdlm.studio.moons import moon_frames
from cdlm.studio.results import result_sections
from cdlm.studio.schema import (
    Completion,
    CompletionResponse,
    ErrorResponse,
    GridModelList,
    Health,
    Infill,
    Limits,
    ModelCard,
    ModelList,
    ResolvedSettings,
    SettingsRequest,
    SudokuRequest,
    SudokuResponse,
)
from cdlm.studio.settings import form_settings, given_settings, request_error
from cdlm.studio.sudoku import check_sudoku, grid_models, grid_of, sudoku_events
from cdlm.text.pipeline import Pipeline
from cdlm.text.sudoku import summarize, written

PAGE = Path(__file__).parent / "page"
MAX_BODY = 1 << 20
"""Bytes in a request."""
DISCONNECT_POLL = 1.0
"""Seconds between two checks whether the client of a plain response is still connected."""
MoonSteps = enum.IntEnum("MoonSteps", {f"S{steps}": steps for steps in (1, 2, 3, 5, 10, 20, 50)})
DEFAULT_MOON_STEPS = MoonSteps(10)
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
CODES = {
    401: "invalid_api_key",
    404: "not_found",
    409: "cancelled",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    500: "internal_error",
}
"""The code of an error with this status, where it has no other."""
UNIONS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "a string or a list of up to four strings, none of them empty",
}
"""What fields of several types take."""
CANCELLED = "this request was cancelled."
FAILED = "the model failed; the log of the server says why."
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse, "description": about}
    for code, about in {
        400: "The request cannot be read, or asks for something that cannot be done; the message says what.",
        401: "The token is missing or wrong.",
        404: "There is no such model, job or result.",
        409: "The request was cancelled.",
        413: "The request is too large.",
        429: "The queue is full.",
    }.items()
}


class ApiError(Exception):
    """A refusal, in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = {429: "rate_limit_error", 500: "server_error"}.get(self.status, "invalid_request_error")
        code = self.code or CODES.get(self.status)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def create_app(
    models: Mapping[str, Pipeline],
    results: Sequence[Path] = (),
    limits: Limits | None = None,
    token: str | None = None,
    max_concurrent: int = 4,
    max_queue: int = 16,
    hosts: Sequence[str] = ("*",),
) -> FastAPI:
    """The service for models by name. With a `token`, requests to /v1 must carry it as a bearer token."""
    limits = limits or Limits()
    queue = JobQueue(max_concurrent, max_queue)
    moons_lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        queue.close()

    about = "Generate text and fill blanks with discrete diffusion models, and watch every step."
    app = FastAPI(
        title="CDLM studio", version=VERSION, description=about, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.add_middleware(Guard, token=token)
    if "*" not in hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response

    @app.exception_handler(ApiError)
    async def _refused(_: Request, error: ApiError) -> Response:
        return error.response

    @app.exception_handler(Exception)
    async def _failed(_: Request, error: Exception) -> Response:
        return ApiError(500, FAILED).response

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] in ("json_invalid", "model_attributes_type"):
            message = "the body must be a JSON object, sent with the content type application/json."
            return ApiError(400, message).response
        where = [str(part) for part in first["loc"] if part not in ("body", "query")]
        message = str(first["msg"]).removeprefix("Value error, ")
        if not where:
            return ApiError(400, message).response
        of_union = where[0] in UNIONS and first["type"] != "extra_forbidden"
        message = f"{where[0]} must be {UNIONS[where[0]]}." if of_union else f"{'.'.join(where)}: {message}"
        return ApiError(400, message, where[0]).response

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html")

    @app.get("/health")
    async def health() -> Health:
        """Whether the service is up, and how busy it is."""
        running, queued = queue.counts
        return Health(models=len(models), running=running, queued=queued, available=queue.max_queue - queued)

    @app.get("/v1/models", responses=_errors(401))
    async def list_models() -> ModelList:
        """The models of this service."""
        return ModelList(data=[model_card(label, model) for label, model in models.items()])

    @app.get("/v1/models/{model:path}", responses=_errors(401, 404))
    async def show_model(model: Annotated[str, PathParameter(description="Its `id`.")]) -> ModelCard:
        """One model."""
        return model_card(model, models[find_model(model)])

    @app.get("/v1/limits", responses=_errors(401))
    async def show_limits() -> Limits:
        """The most that a request may ask for."""
        return limits

    @app.post("/v1/settings", responses=_errors(400, 401, 404, 413))
    def show_settings(request: SettingsRequest) -> ResolvedSettings:
        """Complete the settings of a request without generating anything; settings that do not apply are left out."""
        label = find_model(request.model)
        try:
            return form_settings(label, models[label], given_settings(request), limits)
        except ValueError as error:
            wrong = request_error(error)
            raise ApiError(400, str(wrong), wrong.param) from None

    @app.post("/v1/completions", response_model=CompletionResponse, responses=_errors(400, 401, 404, 409, 413, 429))
    async def completions(body: Completion, request: Request) -> Response:
        """Continue prompts, fill the gap before a suffix, or generate unconditionally: OpenAI's API. With `stream`,
        server-sent events."""
        return await generate(body, request)

    @app.post("/v1/infill", response_model=CompletionResponse, responses=_errors(400, 401, 404, 409, 413, 429))
    async def infill(body: Infill, request: Request) -> Response:
        """Fill the blanks of a text, or generate chosen tokens of a sample again."""
        return await generate(body, request)

    @app.delete("/v1/jobs/{job}", status_code=204, responses=_errors(401, 404))
    async def cancel(job: Annotated[str, PathParameter(description="The `id` of its chunks.")]) -> Response:
        """Cancel a request that is streamed; all its chunks have its `id`."""
        found = queue.find(job)
        if found is None:
            raise ApiError(404, "there is no such job; it may be finished.", "job")
        found.cancel()
        return Response(status_code=204)

    @app.get("/v1/results", responses=_errors(401, 404))
    async def show_results() -> dict[str, Any]:
        """The rows of an evaluation, for the plots."""
        if not results:
            raise ApiError(
                404,
                "there are no results; run cdlm eval MODEL --judge JUDGE --out results, then "
                "cdlm studio MODEL --results results.",
            )
        try:
            return {"sections": await asyncio.to_thread(result_sections, results)}
        except ValueError as error:
            raise ApiError(404, str(error)) from None

    @app.get("/v1/moons", responses=_errors(400, 401))
    async def moons(
        process: Literal["masked", "uniform"] = Query("masked", description="The noise process."),
        steps: Annotated[MoonSteps, Query(description="Steps from noise to data.")] = DEFAULT_MOON_STEPS,
        points: int = Query(600, ge=1, le=1000, description="Number of samples."),
        seed: int = Query(0, ge=0, le=9, description="The same seed generates the same points."),
    ) -> dict[str, Any]:
        """Samples of two moons at every step, drawn with the exact posterior."""
        async with moons_lock:
            return await asyncio.to_thread(moon_frames, process, int(steps), points, seed)

    @app.get("/v1/sudoku/models", responses=_errors(401))
    async def list_grid_models() -> GridModelList:
        """The models that generate Sudoku grids, and the sizes of these."""
        return GridModelList(data=grid_models(models))

    @app.post("/v1/sudoku", responses=_errors(400, 401, 409, 413, 429))
    async def sudoku(body: SudokuRequest, request: Request) -> SudokuResponse:
        """Generate Sudoku grids, or fill the empty cells of a puzzle; the response has the grids after every step."""
        with refusals():
            queue.check_available()
            checked = await asyncio.to_thread(check_sudoku, body, models, limits)
            job, _ = queue.submit(lambda: sudoku_events(checked))
        samples = await last_item(job, request)
        if not isinstance(samples, list):
            raise ApiError(409, CANCELLED)
        totals = summarize(samples)
        return SudokuResponse(
            id=job.id,
            created=int(time.time()),
            model=checked.label,
            size=checked.side,
            puzzle=None if checked.puzzle is None else written(checked.puzzle, checked.side),
            seed=checked.seed,
            summary=checked.summary,
            grids=[grid_of(index, sample) for index, sample in enumerate(samples)],
            valid=totals["valid"],
            distinct=totals["distinct"],
        )

    def find_model(label: str | None) -> str:
        if label is None:
            return next(iter(models))
        if label not in models:
            message = f"there is no model {label!r}; there are: {', '.join(models)}"
            raise ApiError(404, message, "model", "model_not_found")
        return label

    async def generate(body: Completion | Infill, request: Request) -> Response:
        label = find_model(body.model)
        with refusals():
            queue.check_available()
            checked = await asyncio.to_thread(check_request, body, models[label], limits)
            job, ahead = queue.submit(lambda: generation_events(checked))
        head = {"id": job.id, "object": "text_completion", "created": int(time.time()), "model": label}
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(job, stream_events(job, head, checked, ahead, usage))
        return await plain_response(job, {**head, "seed": checked.seed}, request)

    app.mount("/static", StaticFiles(directory=PAGE), name="static")
    app.openapi = lambda: _described(FastAPI.openapi(app))  # type: ignore[method-assign]
    return app


def _described(description: dict[str, Any]) -> dict[str, Any]:
    """The description without FastAPI's own validation errors: they are sent as status 400, like all others."""
    for verbs in description["paths"].values():
        for call in verbs.values():
            call["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        description["components"]["schemas"].pop(name, None)
    return description


async def stream_events(
    job: Job, head: dict[str, Any], request: CheckedRequest, ahead: int, include_usage: bool
) -> AsyncIterator[bytes]:
    """The chunks of a job, one for each choice and piece of news, as server-sent events."""
    head = {**head, "usage": None} if include_usage else head
    try:
        if request.drafts:
            yield _event({**head, "choices": [], "queue_position": ahead, "seed": request.seed})
        async for item in job.items(idle=5.0):
            if item is None:
                yield b": keep-alive\n\n"
            elif isinstance(item, Progress):
                for choice in item.choices:
                    yield _event({**head, "choices": [choice]})
            elif include_usage or request.drafts:
                yield _event({**head, "choices": [], "usage": item.usage.model_dump()})
        if job.cancelled.is_set():
            yield _event(ApiError(409, CANCELLED).body)
        else:
            yield b"data: [DONE]\n\n"
    except ValueError as error:
        yield _event(ApiError(400, str(error)).body)
    except Exception:
        yield _event(ApiError(500, FAILED).body)
        raise


class EventStream(StreamingResponse):
    """The events of a job as they come; if the client disconnects, even before the first, the job is cancelled."""

    def __init__(self, job: Job, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.job.cancel()


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Errors of a request, and a full queue, as responses."""
    try:
        yield
    except ValueError as error:
        wrong = request_error(error)
        raise ApiError(400, str(wrong), wrong.param) from None
    except QueueFull as full:
        raise ApiError(429, f"{full}; try again in a moment.", headers={"retry-after": "2"}) from None


async def plain_response(job: Job, head: dict[str, Any], request: Request) -> Response:
    """The result of a job alone."""
    last = await last_item(job, request)
    if not isinstance(last, Result):
        raise ApiError(409, CANCELLED)
    response = CompletionResponse(**head, choices=last.choices, usage=last.usage)
    return JSONResponse(response.model_dump())


async def last_item(job: Job, request: Request) -> Any:
    """What a job yields last; if the client disconnects, the job is cancelled, however fast its items come."""
    last: Any = None
    checked = time.monotonic()
    try:
        async for item in job.items(DISCONNECT_POLL):
            if time.monotonic() - checked >= DISCONNECT_POLL:
                if await request.is_disconnected():
                    break
                checked = time.monotonic()
            last = item or last
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    finally:
        job.cancel()
    return last


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def model_card(label: str, model: Pipeline) -> ModelCard:
    method = str(model.training.get("method", ""))
    process = model.denoiser.process
    return ModelCard(
        id=label,
        created=int(model.directory.stat().st_mtime) if model.directory and model.directory.exists() else 0,
        method=method_name(method) if method else "",
        process=process.name if process is not None else "none",
        absorbing=process is not None and process.absorbing,
        has_mask=process is not None and process.has_mask,
        num_parameters=model.denoiser.count(),
        vocab_size=model.tokenizer.vocab_size,
        max_length=model.max_length,
        generation_config=model.generation_config,
    )


def _errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: ERROR_RESPONSES[code] for code in codes}


class Guard:
    """Middleware around everything: the token, the size of a request, and security headers."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.lower(): value for key, value in scope["headers"]}

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((k.encode(), v.encode()) for k, v in SECURITY_HEADERS.items()),
                ]
            await send(message)

        refusal: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None
        if self.token and scope["path"].startswith(("/v1", "/openapi")):
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
            if not hmac.compare_digest(given, self.token.encode()):
                refusal = ApiError(
                    401,
                    "the token is missing or wrong; open the page with ?token=..., or send it as a bearer token (the "
                    "API key of a client).",
                ).response
        if int(headers.get(b"content-length", b"0") or 0) > MAX_BODY:
            refusal = ApiError(413, f"a request has at most {MAX_BODY:,} bytes.").response
        if refusal is not None:
            await refusal(scope, receive, guarded)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY:
                raise HTTPException(413, f"a request has at most {MAX_BODY:,} bytes.")
            return message

        await self.app(scope, counted, guarded)
