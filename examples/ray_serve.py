"""The engine as a Ray Serve deployment: one engine a replica, and as many replicas as the requests under way ask for.

    pip install 'ray[serve]'
    serve run --working-dir . ray_serve:build server_args="--model-path tiny-gemma4" max_replicas=2
    curl http://127.0.0.1:8000/ -d '{"text": "<bos>What is", "sampling_params": {"max_new_tokens": 8}}'

Requests and replies are those of the server's `/generate`, streams too. A replica that ends takes its requests along,
whose clients get an error; Ray starts another one.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

import sglang
from sglang.srt.server_args import prepare_server_args


@serve.deployment(max_ongoing_requests=256)
class Generator:
    """A replica. ``flags`` are those of `python -m sglang.launch_server`."""

    def __init__(self, flags: str) -> None:
        self._engine = sglang.Engine(server_args=prepare_server_args(shlex.split(flags)))

    async def __call__(self, request: Request) -> Response:
        try:
            body = await request.json()
            reply = await self._engine.async_generate(body.pop("text", None), **body)
        except (TypeError, ValueError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        if body.get("stream"):
            return StreamingResponse(_events(reply), media_type="text/event-stream")
        return JSONResponse(reply)

    async def check_health(self) -> None:
        """Ray replaces a replica for which this fails."""
        await asyncio.to_thread(self._engine.get_server_info)


async def _events(outputs: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for output in outputs:
            yield f"data: {json.dumps(output)}\n\n"
    except (ValueError, RuntimeError) as error:
        yield f"data: {json.dumps({'error': str(error)})}\n\n"
    yield "data: [DONE]\n\n"


def build(args: Mapping[str, str]) -> serve.Application:
    """The application, from what `serve run` is given as NAME=VALUE.

    ``server_args``: flags of the engine. ``min_replicas`` and ``max_replicas``: there are as many as it takes for each
    to have ``target_ongoing_requests``. ``num_gpus``: GPUs of a replica; on a CPU replicas share it.
    """
    return Generator.options(
        autoscaling_config={
            "min_replicas": int(args.get("min_replicas", "1")),
            "max_replicas": int(args.get("max_replicas", "2")),
            "target_ongoing_requests": float(args.get("target_ongoing_requests", "8")),
            "upscale_delay_s": float(args.get("upscale_delay_s", "30")),
        },
        ray_actor_options={"num_cpus": 0, "num_gpus": float(args.get("num_gpus", "0"))},
    ).bind(args["server_args"])
