"""Routes that act on the whole server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from sglang.srt.entrypoints.native_protocol import check_fields
from sglang.srt.entrypoints.profile_request import flag, parse_profile
from sglang.srt.entrypoints.responses import json_response, read_object
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.managers.tokenizer_manager import TokenizerManager, first_refusal
from sglang.srt.server_args import ServerArgs

UPDATE_FIELDS = ("model_path", "draft_model_path", "load_format", "abort_all_requests")
# fields of sglang that have no effect with these values
_UPDATE_LATER: Mapping[str, tuple[Any, ...]] = {
    "flush_cache": (True,),
    "is_async": (),
    "keep_pause": (),
    "recapture_cuda_graph": (),
    "token_step": (0,),
    "torch_empty_cache": (),
    "weight_version": (),
}


def admin_routes(manager: TokenizerManager, state: ServerState) -> APIRouter:
    router = APIRouter()
    _add_requests(router, manager)
    _add_settings(router, state)
    _add_profile(router, state)
    _add_weights(router, state)
    return router


def _add_requests(router: APIRouter, manager: TokenizerManager) -> None:
    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        refusal = first_refusal(await manager.control("flush_cache"))
        return json_response(
            {"success": not refusal, "message": refusal or "the cache is empty"}, 400 if refusal else 200
        )

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await read_object(request)
        rid, abort_all = body.get("rid"), flag(body, "abort_all")
        if not abort_all and not (isinstance(rid, str) and rid):
            raise ValueError(f"rid must name a request, or abort_all must be true, got {rid!r:.200}")
        return json_response({"aborted": manager.abort_request(rid, abort_all=abort_all)})

    @router.post("/pause_generation")
    async def pause_generation(request: Request) -> Response:
        mode = (await read_object(request, may_be_empty=True)).get("mode", "abort")
        if mode != "abort":
            raise ValueError(f"mode must be 'abort', got {mode!r:.200}: running requests cannot be kept")
        return json_response({"status": "ok", "aborted": manager.pause_generation()})

    @router.post("/continue_generation")
    async def continue_generation() -> Response:
        manager.continue_generation()
        return json_response({"status": "ok"})


def _add_settings(router: APIRouter, state: ServerState) -> None:
    @router.get("/get_internal_state")
    async def get_internal_state() -> Response:
        return json_response(await state.internal_states())

    @router.api_route("/set_internal_state", methods=["POST", "PUT"])
    async def set_internal_state(request: Request) -> Response:
        body = await read_object(request)
        check_fields(body, ("server_args",), {})
        changes = body.get("server_args")
        if not isinstance(changes, dict) or not changes:
            raise ValueError(f"server_args must be an object of names and values, got {changes!r:.200}")
        await state.set_internal_state(changes)
        return json_response([True])


def _add_profile(router: APIRouter, state: ServerState) -> None:
    @router.api_route("/start_profile", methods=["GET", "POST"])
    async def start_profile(request: Request) -> Response:
        options = parse_profile(await read_object(request, may_be_empty=True))
        folder = await state.start_profile(options)
        return json_response({"success": True, "message": "Start profiling.", "output_dir": folder})

    @router.api_route("/stop_profile", methods=["GET", "POST"])
    async def stop_profile() -> Response:
        file, *others = await state.stop_profile()
        reply = {"success": True, "message": "Stop profiling.", "output_file": file}
        return json_response(reply | {"output_files": [file, *others]} if others else reply)


def _add_weights(router: APIRouter, state: ServerState) -> None:
    # where the server itself found its weights when it started
    started = state.args

    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(request: Request) -> Response:
        body = await read_object(request)
        check_fields(body, UPDATE_FIELDS, _UPDATE_LATER)
        if body.get("load_format") not in (None, "auto", "safetensors"):
            raise ValueError(f"load_format must be 'auto' or 'safetensors', got {body['load_format']!r:.200}")
        target = _checkpoint(body, "model_path", started, Path(started.model_path))
        draft_home = started.speculative_draft_model_path
        draft = None
        if body.get("draft_model_path") is not None:
            draft = _checkpoint(body, "draft_model_path", started, None if draft_home is None else Path(draft_home))
        update = await state.update_weights(target, draft, abort=flag(body, "abort_all_requests"))
        reply = {"success": not update.message, "message": update.message or "Succeeded to update model weights."}
        return json_response(reply | {"num_paused_requests": update.num_paused}, 400 if update.message else 200)


def _checkpoint(body: Mapping[str, Any], name: str, started: ServerArgs, home: Path | None) -> Path:
    """The directory that a request names. One sentence for all that is not allowed or not there: paths in requests
    must not tell what a machine has."""
    value = body.get(name)
    roots = [Path(root) for root in (started.update_weights_dir, home) if root is not None]
    if isinstance(value, str) and value and "\0" not in value and roots:
        path = os.path.realpath(roots[0] / value)
        if any(Path(path).is_relative_to(root.resolve()) for root in roots) and os.path.isdir(path):
            return Path(path)
    raise ValueError(
        f"{name} must be a checkpoint directory under --update-weights-dir, or the directory that the weights were "
        f"started from, got {value!r:.200}"
    )
