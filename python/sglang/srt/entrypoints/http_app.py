"""Every route of the HTTP API over a running tokenizer manager."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from sglang.srt.entrypoints.admin_routes import admin_routes
from sglang.srt.entrypoints.anthropic_messages import messages_routes
from sglang.srt.entrypoints.auth import ApiKeyMiddleware
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.native_protocol import generate_events, generate_reply, parse_generate_request
from sglang.srt.entrypoints.openai_responses import responses_routes
from sglang.srt.entrypoints.openai_serving import OpenAIServing
from sglang.srt.entrypoints.openapi import openapi_document
from sglang.srt.entrypoints.parse_routes import parse_routes
from sglang.srt.entrypoints.playground import playground_router
from sglang.srt.entrypoints.prometheus import ServerMetrics
from sglang.srt.entrypoints.responses import (
    EventStream,
    error_response,
    json_response,
    read_object,
    while_connected,
)
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.entrypoints.tokenization import detokenize_reply, tokenize_reply
from sglang.srt.entrypoints.warmup import probe_request
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError, TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__

_HEALTH_GENERATE_S = 20.0
# less than what Prometheus waits for a scrape by default
_METRICS_S = 5.0


@dataclass(frozen=True, slots=True)
class Context:
    """What the routes work with. ``metrics`` is None when there are none to show."""

    state: ServerState
    manager: TokenizerManager
    openai: OpenAIServing
    metrics: ServerMetrics | None
    started_at: int


def build_app(server_args: ServerArgs, manager: TokenizerManager, metrics: ServerMetrics | None) -> FastAPI:
    """All routes over a running manager; ``metrics`` observes it."""
    state = ServerState(server_args, manager)
    ctx = Context(state, manager, OpenAIServing(server_args, manager), metrics, int(time.time()))
    app = FastAPI(title="sglang", version=__version__)
    _add_generation(app, ctx)
    app.include_router(responses_routes(manager, ctx.openai))
    app.include_router(messages_routes(manager, ctx.openai))
    app.include_router(parse_routes(server_args))
    _add_tokenization(app, ctx)
    _add_models(app, ctx)
    _add_health(app, ctx)
    _add_metrics(app, ctx)
    administration = admin_routes(manager, ctx.state)
    app.include_router(administration)
    app.include_router(playground_router())
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)
    for kind in (ApiError, ValueError, RuntimeError):
        app.add_exception_handler(kind, _on_exception)
    needs_key = server_args.api_key is not None or server_args.admin_api_key is not None
    document = openapi_document(app, needs_key=needs_key)
    app.openapi = lambda: document  # type: ignore[method-assign]
    if needs_key:
        app.add_middleware(
            ApiKeyMiddleware,
            api_key=server_args.api_key,
            admin_api_key=server_args.admin_api_key,
            admin_paths=[route.path for route in administration.routes if isinstance(route, APIRoute)],
        )
    if server_args.cors_origins:
        # around everything else: a page has to see refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=server_args.cors_origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["*"],
        )
    return app


def _add_generation(app: FastAPI, ctx: Context) -> None:
    @app.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        req = parse_generate_request(await read_object(request))
        if req.stream:
            return EventStream(generate_events(ctx.manager, req))
        outputs = await while_connected(request.receive, ctx.manager.generate_whole(req))
        return json_response(generate_reply(req, outputs))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        completion = await ctx.openai.chat(await read_object(request))
        if completion.is_stream:
            return EventStream(completion.stream())
        return json_response(await while_connected(request.receive, completion.whole()))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        completion = await ctx.openai.completion(await read_object(request))
        if completion.is_stream:
            return EventStream(completion.stream())
        return json_response(await while_connected(request.receive, completion.whole()))


def _add_tokenization(app: FastAPI, ctx: Context) -> None:
    @app.post("/v1/tokenize")
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_object(request)
        ctx.openai.check_model(body.get("model"))
        return json_response(await tokenize_reply(ctx.manager, body))

    @app.post("/v1/detokenize")
    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_object(request)
        ctx.openai.check_model(body.get("model"))
        return json_response(await detokenize_reply(ctx.manager, body))


def _add_models(app: FastAPI, ctx: Context) -> None:
    model = {
        "id": ctx.openai.model_name,
        "object": "model",
        "created": ctx.started_at,
        "owned_by": "sglang",
        "root": ctx.openai.model_name,
        "parent": None,
        "max_model_len": ctx.manager.limits.context_len,
    }

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        ctx.openai.check_model(name)
        return json_response(model)

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info() -> Response:
        return json_response(
            {
                "model_path": ctx.state.args.model_path,
                "tokenizer_path": ctx.state.args.tokenizer_path,
                "served_model_name": ctx.openai.model_name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "max_model_len": ctx.manager.limits.context_len,
            }
        )

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info() -> Response:
        return json_response(await ctx.state.info())

    @app.get("/get_load")
    async def get_load() -> Response:
        return json_response(await ctx.state.loads())


def _add_health(app: FastAPI, ctx: Context) -> None:
    @app.get("/ping")
    @app.get("/health")
    async def health() -> Response:
        if ctx.manager.died is not None:
            raise ApiError(503, ctx.manager.died)
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        _check_ready(ctx)
        return Response()

    @app.get("/health_generate")
    async def health_generate() -> Response:
        _check_ready(ctx)
        try:
            await asyncio.wait_for(ctx.manager.generate_whole(probe_request(ctx.manager, 1)), _HEALTH_GENERATE_S)
        except asyncio.TimeoutError:
            raise ApiError(503, f"no token was generated within {_HEALTH_GENERATE_S:g} seconds") from None
        except SchedulerDiedError as error:
            raise ApiError(503, str(error)) from error
        return Response()


def _check_ready(ctx: Context) -> None:
    """``ApiError`` 503 when a request would not be served now."""
    if ctx.manager.closed_because is not None:
        raise ApiError(503, ctx.manager.closed_because)


def _add_metrics(app: FastAPI, ctx: Context) -> None:
    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        if ctx.metrics is None:
            raise ApiError(404, "there are no metrics: start the server with --enable-metrics")
        try:
            replies = await ctx.manager.control("server_info", _METRICS_S)
        except (asyncio.TimeoutError, SchedulerDiedError):
            replies = []
        accept = request.headers.get("accept", "")
        page, content_type = ctx.metrics.render(
            accept, {reply.replica: reply.data for reply in replies}, ctx.manager.lost_replicas
        )
        return Response(page, headers={"Content-Type": content_type})


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is nothing at {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }
    api_error = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))
    response = error_response(api_error, request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _on_exception(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)
