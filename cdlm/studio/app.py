"""The HTTP service of the studio: models that write, over JSON and server-sent events, with the page on top."""

import asyncio
import contextlib
import enum
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cdlm.eval.report.rows import control_label, read_sections, display_name, unconditional_rows
from cdlm.files import VERSION
from cdlm.methods import method_name
from cdlm.studio.jobs import Desk, Full, Job
from cdlm.studio.moons import moving_points
from cdlm.studio.schema import Completion, Health, Infill, Limits, ModelCard, ModelList, Problem, Written
from cdlm.studio.writing import Event, events, order
from cdlm.text.pipeline import Pipeline

PAGE = Path(__file__).parent / "page"
BODY = 1 << 20
"""Bytes in a request."""
LOOK = 1.0
"""Seconds between two looks whether the reader of a plain answer is still there."""
MoonSteps = enum.IntEnum("MoonSteps", {f"S{steps}": steps for steps in (1, 2, 3, 5, 10, 20, 50)})
TEN = MoonSteps(10)
HEADERS = {
    "content-security-policy": "default-src 'self'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
WRONG: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem, "description": about}
    for code, about in {
        400: "The request cannot be read.",
        401: "The token is missing or wrong.",
        404: "There is no such model, job or result.",
        409: "The text was cancelled.",
        413: "The request is too large.",
        422: "The request asks for something that cannot be done; the message says what.",
        429: "Too many texts are waiting to be written.",
    }.items()
}


def create_app(
    models: Mapping[str, Pipeline],
    results: Sequence[Path] = (),
    limits: Limits | None = None,
    token: str | None = None,
    at_once: int = 4,
    waiting: int = 16,
    hosts: Sequence[str] = ("*",),
) -> FastAPI:
    """The service for some models. With a `token`, requests to /v1 must carry it as a bearer token."""
    limits = limits or Limits()
    desk = Desk(at_once, waiting)
    drawing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        desk.close()

    about = "Text by discrete diffusion: write, fill blanks, and watch every step."
    app = FastAPI(
        title="CDLM studio", version=VERSION, description=about, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.add_middleware(Guard, token=token)
    if "*" not in hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] in ("json_invalid", "model_attributes_type"):
            return problem(422, "the body must be a JSON object, sent with the content type application/json")
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return problem(422, f"{where}: {first['msg']}" if where else str(first["msg"]).removeprefix("Value error, "))

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html")

    @app.get("/health")
    async def health() -> Health:
        """Whether the service is up, and how busy it is."""
        running, queued = desk.counts
        return Health(models=len(models), running=running, waiting=queued, room=desk.most - queued)

    @app.get("/v1/models", responses=_wrong(401))
    async def list_models() -> ModelList:
        """The models that write here."""
        return ModelList(data=[card(label, model) for label, model in models.items()])

    @app.get("/v1/limits", responses=_wrong(401))
    async def show_limits() -> Limits:
        """The most that a request may ask for."""
        return limits

    @app.post("/v1/completions", response_model=Written, responses=_wrong(400, 401, 404, 409, 413, 422, 429))
    async def completions(asked: Completion, request: Request) -> Response:
        """Continue a prompt, or write from nothing. With `stream`, as server-sent events: start, frames, done."""
        return await write(asked, request)

    @app.post("/v1/infill", response_model=Written, responses=_wrong(400, 401, 404, 409, 413, 422, 429))
    async def infill(asked: Infill, request: Request) -> Response:
        """Fill the blanks of a text, or write chosen tokens anew."""
        return await write(asked, request)

    named = {"name": "job", "in": "path", "required": True, "schema": {"type": "string"}}  # any name will do: no 422
    named["description"] = "The `id` of its `start` event."

    @app.delete("/v1/jobs/{job}", status_code=204, responses=_wrong(401, 404), openapi_extra={"parameters": [named]})
    async def cancel(request: Request) -> Response:
        """Stop writing a text; `start` events name the job."""
        found = desk.find(request.path_params["job"])
        if found is None:
            raise HTTPException(404, "there is no such job; it may be finished")
        found.cancel()
        return Response(status_code=204)

    @app.get("/v1/results", responses=_wrong(401, 404))
    async def show_results() -> dict[str, Any]:
        """The cells of an evaluation, for the plots."""
        if not results:
            raise HTTPException(
                404,
                "no results: cdlm eval MODEL --judge JUDGE --out results, then cdlm studio MODEL --results results",
            )
        try:
            return {"sections": await asyncio.to_thread(sections, results)}
        except ValueError as error:
            raise HTTPException(404, str(error)) from None

    @app.get("/v1/moons", responses=_wrong(401, 422))
    async def moons(
        process: Literal["masked", "uniform"] = Query("masked", description="What the noise does to a coordinate."),
        steps: Annotated[MoonSteps, Query(description="From noise to data.")] = TEN,
        points: int = Query(600, ge=1, le=1000, description="How many to draw."),
        seed: int = Query(0, ge=0, le=9, description="The same seed draws the same points."),
    ) -> dict[str, Any]:
        """Samples of two moons on their way, drawn with the exact posterior."""
        async with drawing:
            return await asyncio.to_thread(moving_points, process, int(steps), points, seed)

    async def write(asked: Completion | Infill, request: Request) -> Response:
        label = next(iter(models)) if asked.model is None else asked.model
        if label not in models:
            raise HTTPException(404, f"there is no model {label!r}; there are: {', '.join(models)}")
        try:
            desk.check_room()
            checked = await asyncio.to_thread(order, asked, models[label], limits)
            job, ahead = desk.submit(lambda: events(checked))
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        except Full as full:
            raise HTTPException(429, f"{full}; try again in a moment", {"retry-after": "2"}) from None
        if asked.stream:
            start = Event("start", {"id": job.id, "model": label, "position": ahead})
            return Stream(job, stream(job, label, start))
        return await finished(job, label, request)

    app.mount("/static", StaticFiles(directory=PAGE), name="static")
    return app


async def stream(job: Job, label: str, start: Event) -> AsyncIterator[bytes]:
    """The events of a job."""
    try:
        yield sent(start)
        async for event in job.items(idle=5.0):
            if event is None:
                yield b": still here\n\n"
            else:
                yield sent(complete(event, job, label))
        if job.cancelled.is_set():
            yield sent(Event("error", {"error": {"message": "cancelled", "type": "cancelled"}}))
    except ValueError as error:
        yield sent(Event("error", {"error": {"message": str(error), "type": "invalid"}}))
    except Exception:
        yield sent(
            Event("error", {"error": {"message": "the model failed; the server's log says why", "type": "internal"}})
        )
        raise


class Stream(StreamingResponse):
    """The events of a job as they come; if the reader goes away, even before the first, so does the job."""

    def __init__(self, job: Job, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.job.cancel()


async def finished(job: Job, label: str, request: Request) -> Response:
    """The end of a job alone; if the reader goes away, so does the job, however fast its events come."""
    last: Event | None = None
    looked = time.monotonic()
    try:
        async for event in job.items(LOOK):
            if time.monotonic() - looked >= LOOK:
                if await request.is_disconnected():
                    break
                looked = time.monotonic()
            last = event or last
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    finally:
        job.cancel()
    if last is None or last.kind != "done":
        raise HTTPException(409, "this text was cancelled")
    return JSONResponse(complete(last, job, label).data)


def complete(event: Event, job: Job, label: str) -> Event:
    """The last event says whose it is."""
    if event.kind != "done":
        return event
    return Event("done", jsonable_encoder(Written(id=job.id, created=int(time.time()), model=label, **event.data)))


def sent(event: Event) -> bytes:
    return f"event: {event.kind}\ndata: {json.dumps(event.data, ensure_ascii=False)}\n\n".encode()


def card(label: str, model: Pipeline) -> ModelCard:
    method = str(model.training.get("method", ""))
    process = model.denoiser.process
    return ModelCard(
        id=label,
        method=method_name(method) if method else "",
        process=process.name if process is not None else "none",
        absorbing=process is not None and process.absorbing,
        has_mask=process is not None and process.has_mask,
        parameters=model.denoiser.count(),
        vocab=model.tokenizer.vocab_size,
        length=model.max_length,
        sampling=model.generation_config,
    )


def sections(results: Sequence[Path]) -> list[dict[str, Any]]:
    """Judged texts from nothing, sorted by judge."""
    found, _ = read_sections(results)
    kept = ("ppl", "entropy", "nfe", "num_samples")
    return [
        {
            "judge": section.judge,
            "protocol": section.protocol,
            "length": section.length,
            "rows": [
                {
                    "model": display_name(row),
                    "steps": row["sampling"]["steps"],
                    "control": control_label(row),
                    "precision": row["sampling"]["precision"],
                    "low": row["ppl_interval"][0],
                    "high": row["ppl_interval"][1],
                    **{key: row[key] for key in kept},
                }
                for row in unconditional_rows(section.rows)
            ],
        }
        for section in found
    ]


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kinds = {
        400: "unreadable",
        401: "unauthorized",
        404: "missing",
        409: "cancelled",
        413: "too large",
        422: "invalid",
        429: "busy",
    }
    return JSONResponse({"error": {"message": message, "type": kinds.get(status, "error")}}, status, headers)


def _wrong(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: WRONG[code] for code in codes}


class Guard:
    """Around everything: the token, the size of a request, and headers that keep browsers from harm."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.lower(): value for key, value in scope["headers"]}

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        answer: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None
        if self.token and scope["path"].startswith(("/v1", "/openapi")):
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
            if not hmac.compare_digest(given, self.token.encode()):
                answer = problem(
                    401, "this service wants its token: open the page with ?token=..., or send it as a bearer token"
                )
        if int(headers.get(b"content-length", b"0") or 0) > BODY:
            answer = problem(413, f"a request has at most {BODY:,} bytes")
        if answer is not None:
            await answer(scope, receive, guarded)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > BODY:
                raise HTTPException(413, f"a request has at most {BODY:,} bytes")
            return message

        await self.app(scope, counted, guarded)
