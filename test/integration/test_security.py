"""What a checkpoint, a request or a log must not be able to do."""

from __future__ import annotations

import asyncio
import hmac
import json
import pickle
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.server_process import ServerProcess, launch, ready_server
from sglang.srt.entrypoints import auth
from sglang.srt.entrypoints.chat_prompt import ChatTemplate
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.errors import ApiError
from sglang.srt.entrypoints.openai_protocol import parse_chat_request
from sglang.srt.entrypoints.responses import MAX_BODY_BYTES, MAX_NESTING
from sglang.srt.managers.tokenizer_manager import SchedulerDiedError
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

USER_KEY, ADMIN_KEY = "user-key-7f3a", "admin-key-91bc"
SECRET = "the-content-of-a-file"


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret.txt"
    file.write_text(SECRET)
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("security")
    config = folder / "server.yaml"
    config.write_text(f"api-key: {USER_KEY}\nadmin-api-key: {ADMIN_KEY}\n")
    logs = ("--log-level", "debug", "--log-requests", "--log-requests-level", "3", "--log-requests-format", "json")
    with ready_server(folder, "--config", str(config), *logs, "--served-model-name", "pet") as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=60) as session:
        yield session


# --- code of a checkpoint


@pytest.fixture
def own_code(trained_pair: EmbeddedModel, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose configuration, model and tokenizer are its own classes, and the file that they would write."""
    folder, mark = Path(shutil.copytree(trained_pair.target, tmp_path / "own_code")), tmp_path / "mark"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').write('run')\nclass C:\n    pass\n")
    for name, auto_map in (
        ("config.json", {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.C"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own.C", "own.C"]}),
    ):
        content = json.loads((folder / name).read_text())
        if name == "tokenizer_config.json":
            content["tokenizer_class"] = "C"
        (folder / name).write_text(json.dumps(content | {"auto_map": auto_map}))
    return folder, mark


def test_code_of_a_model_is_refused_by_name(own_code: tuple[Path, Path]) -> None:
    folder, mark = own_code
    for role in (
        {"model_path": str(folder)},
        {"model_path": "tiny-gemma4", "speculative_draft_model_path": str(folder)},
    ):
        spec = {"speculative_algorithm": "FROZEN_KV_MTP"} if len(role) > 1 else {}
        with pytest.raises(ValueError, match="--trust-remote-code"):
            resolve_server_args(ServerArgs(device="cpu", **role, **spec))
    assert not mark.exists()


def test_code_of_a_tokenizer_is_not_run(own_code: tuple[Path, Path]) -> None:
    folder, mark = own_code
    try:
        load_tokenizer(folder, trust_remote_code=False)
    except ValueError as error:
        assert "cannot be loaded" in str(error)
    assert not mark.exists()


def test_a_server_does_not_start_from_such_a_checkpoint(own_code: tuple[Path, Path], tmp_path: Path) -> None:
    folder, mark = own_code
    with launch(tmp_path, "--model-path", str(folder)) as refused:
        assert refused.process.wait(90) == 2
        assert "--trust-remote-code" in refused.output.strip().splitlines()[-1] and "Traceback" not in refused.output
    assert not mark.exists()


class _Writes:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.write_text, (self._mark, "run")


def test_pickled_weights_are_not_read(trained_pair: EmbeddedModel, tmp_path: Path) -> None:
    folder, mark = Path(shutil.copytree(trained_pair.target, tmp_path / "pickled")), tmp_path / "mark"
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Writes(mark)))
    with pytest.raises(SchedulerDiedError, match=r"holds no \.safetensors file"):
        Engine(model_path=str(folder), device="cpu", log_level="warning")
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists(), "the file would have done it"


# --- templates

# FILE is a file to be read, MARK one to be made
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}",
    "{{ lipsum.__globals__['os'].popen('touch MARK').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__code__ }}",
    "{{ namespace.__init__.__globals__['__builtins__']['open']('FILE').read() }}",
    "{% include 'FILE' %}",
    "{% import 'FILE' as x %}",
    "{% extends 'FILE' %}",
    "{{ open('FILE').read() }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{{ ('%s' | attr('format')).__globals__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': cycler}) }}",
    "{% set f = cycler.__init__ %}{{ f.__globals__ }}",
    "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
    "{{ range(10 ** 9) | list }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ 1 / 0 }}",
    "{{ 2 ** 'x' }}",
    "{% for x in y %}",
]
LEAKS = (SECRET, "<class", "<function", "<module", "<code", "built-in", "'os'")


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_of_a_checkpoint_cannot_leave_its_sandbox(
    template: str, trained_pair: EmbeddedModel, secret_file: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    tokenizer = load_tokenizer(trained_pair.target, trust_remote_code=False)
    tokenizer.chat_template = template.replace("FILE", str(secret_file)).replace("MARK", str(mark))
    chat = parse_chat_request({"messages": [{"role": "user", "content": "Hello"}]}, {})
    try:
        said = ChatTemplate(tokenizer).render(chat)
    except ApiError as error:  # and no other error
        assert error.status == 400
        said = error.message
    assert not [leak for leak in LEAKS if leak in said] and not mark.exists()


def test_requests_bring_no_templates(client: httpx.Client) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "{{ 7 * 7 }}{% include 'x' %}"}], "max_tokens": 1}
    template = "{{ messages }}"
    for body, named in (
        ({"chat_template": template}, "chat_template"),
        *(({"chat_template_kwargs": {name: template}}, name) for name in ("chat_template", "tokenize", "messages")),
        ({"chat_template_kwargs": {"self": 1}}, "self"),
        ({"chat_template_kwargs": {"return_dict": True}}, "return_dict"),
    ):
        reply = client.post("/v1/chat/completions", json=chat | body)
        assert reply.status_code == 400 and named in reply.json()["error"]["message"], (body, reply.text)
    # what users write is text, also where it looks like a template
    counted = client.post("/v1/chat/completions", json=chat).raise_for_status().json()["usage"]["prompt_tokens"]
    plain = chat | {"messages": [{"role": "user", "content": "49"}]}
    assert counted > client.post("/v1/chat/completions", json=plain).json()["usage"]["prompt_tokens"] + 5


# --- keys


def test_keys_are_never_logged(server: ServerProcess, client: httpx.Client) -> None:
    for key in (USER_KEY, ADMIN_KEY, "wrong-key-55aa"):
        for header in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
            for path, body in (
                ("/generate", {"text": "<bos>", "sampling_params": {"max_new_tokens": 1}}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
                ("/generate", {"bogus": 1}),
                ("/flush_cache", {}),
                ("/nothing", {}),
            ):
                httpx.post(server.url + path, headers=header, json=body, timeout=60)
    changes = {"server_args": {"log_requests": True, "log_requests_level": 3}}
    assert client.post("/set_internal_state", json=changes).status_code == 200
    info = client.get("/server_info").raise_for_status()
    lines = server.output
    assert '"event": "request.received"' in lines and '"text": "<bos>"' in lines, "the log does not tell what it should"
    for key in (USER_KEY, ADMIN_KEY, "wrong-key-55aa"):
        assert key not in lines and key not in info.text
    assert "Traceback" not in lines


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key goes through the one function that takes the same time for any content, and all are compared."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    class Module:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(auth, "hmac", Module)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("let through")

    async def send(message: Any) -> None:
        pass

    guard = auth.ApiKeyMiddleware(app, USER_KEY, ADMIN_KEY, ["/flush_cache"])
    for given in (b"", b"Bearer x", f"Bearer {USER_KEY[:-1]}".encode(), USER_KEY.encode()):
        compared.clear()
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [(b"authorization", given)]}
        asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
        assert compared == [(given, f"Bearer {key}".encode()) for key in (USER_KEY, ADMIN_KEY)]
    sources = Path(auth.__file__).read_text()
    assert "==" not in sources.partition("__call__")[2].partition("matches")[2].partition("message")[0]


# --- paths


def test_paths_in_requests_read_no_files(client: httpx.Client, secret_file: Path) -> None:
    path, url = str(secret_file), secret_file.as_uri()
    generate: dict[str, Any] = {"text": "<bos>", "sampling_params": {"max_new_tokens": 1}}
    message = {"role": "user", "content": "Hello"}
    chat: dict[str, Any] = {"messages": [message], "max_tokens": 1}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    refused = [
        ("/generate", generate | {"lora_path": path}),
        ("/generate", generate | {"image_data": url}),
        ("/generate", generate | {"session_params": {"path": path}}),
        ("/generate", generate | {"custom_logit_processor": path}),
        ("/v1/chat/completions", chat | {"messages": [image]}),
        ("/v1/chat/completions", chat | {"model": path}),
        ("/v1/completions", {"prompt": "Hi", "model": path}),
        ("/start_profile", {"output_dir": str(secret_file.parent)}),
        ("/update_weights_from_disk", {"model_path": str(secret_file.parent)}),
        ("/update_weights_from_disk", {"model_path": path}),
        ("/set_internal_state", {"server_args": {"chat_template": path}}),
        ("/set_internal_state", {"server_args": {"update_weights_dir": "/"}}),
    ]
    for where, body in refused:
        reply = client.post(where, json=body)
        assert 400 <= reply.status_code < 500 and SECRET not in reply.text, (where, body, reply.text)
    for where in (
        f"/v1/models/{path}",
        f"/{path}",
        "/..%2f..%2fetc/passwd",
        f"/%2e%2e/{path}",
        "/static/../server.yaml",
    ):
        reply = client.get(where)
        assert reply.status_code == 404 and SECRET not in reply.text, where
    # a schema that names a file says nothing about what it refers to
    formats = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": url}}}
    schema = generate | {"sampling_params": {"max_new_tokens": 9, "json_schema": json.dumps({"$ref": url})}}
    for where, body in (("/generate", schema), ("/v1/chat/completions", chat | {"response_format": formats})):
        reply = client.post(where, json=body)
        assert reply.status_code < 500 and SECRET not in reply.text
    # a text that is a path is a text
    reply = client.post("/tokenize", json={"prompt": path})
    assert reply.status_code == 200 and reply.json()["count"] > 3


# --- limits


def test_large_bodies_are_refused_while_they_arrive(server: ServerProcess, client: httpx.Client) -> None:
    too_much = MAX_BODY_BYTES + 1

    def chunks() -> Iterator[bytes]:
        yield b'{"text": "'
        for _ in range(0, too_much, 1 << 20):
            yield b"x" * (1 << 20)
        yield b'"}'

    for path in ("/generate", "/v1/chat/completions", "/v1/messages", "/tokenize", "/update_weights_from_disk"):
        announced = _raw(server, path, f"Content-Length: {too_much}", b"{")
        assert b" 413 " in announced, (path, announced)
    reply = client.post("/generate", content=chunks())
    assert reply.status_code == 413 and str(MAX_BODY_BYTES) in reply.json()["error"]["message"]
    assert client.get("/health_generate").status_code == 200


def _raw(server: ServerProcess, path: str, header: str, body: bytes) -> bytes:
    """The first bytes of the reply to a request whose body does not come."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ADMIN_KEY}\r\n{header}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection.recv(200)


def _nested(depth: int, leaf: str = "1") -> str:
    """Lists and objects in one another."""
    opened = "".join("[" if i % 2 else '{"a":' for i in range(depth))
    return opened + leaf + "".join("}" if i % 2 == 0 else "]" for i in reversed(range(depth)))


NESTING = [
    ("/generate", '{{"text": "<bos>", "sampling_params": {}}}'),
    ("/generate", '{{"text": "<bos>", "sampling_params": {{"max_new_tokens": 1, "custom_params": {}}}}}'),
    ("/generate", '{{"text": "<bos>", "sampling_params": {{"max_new_tokens": 1, "json_schema": {}}}}}'),
    ("/generate", '{{"input_ids": {}}}'),
    ("/tokenize", '{{"prompt": {}}}'),
    ("/v1/completions", '{{"prompt": {}}}'),
    ("/v1/chat/completions", '{{"messages": {}}}'),
    ("/v1/chat/completions", '{{"max_tokens": 1, "messages": [{{"role": "user", "content": "x"}}], "metadata": {}}}'),
    (
        "/v1/chat/completions",
        '{{"max_tokens": 1, "messages": [{{"role": "user", "content": "x"}}], "chat_template_kwargs": {{"x": {}}}}}',
    ),
    (
        "/v1/chat/completions",
        '{{"max_tokens": 1, "messages": [{{"role": "user", "content": "x"}}], "tools": [{{"type": "function", '
        '"function": {{"name": "f", "parameters": {}}}}}]}}',
    ),
    ("/v1/messages", '{{"max_tokens": 1, "messages": {}}}'),
    ("/v1/responses", '{{"input": {}}}'),
    ("/set_internal_state", '{{"server_args": {}}}'),
    ("/abort_request", '{{"rid": {}}}'),
]


@pytest.mark.parametrize(("path", "body"), NESTING)
@pytest.mark.parametrize("depth", [MAX_NESTING - 8, MAX_NESTING, 990, 100_000])
def test_nesting_has_a_limit_and_no_depth_is_an_error_of_the_server(
    client: httpx.Client, path: str, body: str, depth: int
) -> None:
    reply = client.post(path, content=body.format(_nested(depth)))
    assert reply.status_code < 500, reply.text
    if depth >= MAX_NESTING:
        assert reply.status_code == 400
        text = reply.text
        assert f"more than {MAX_NESTING} deep" in text or "not valid JSON" in text, text


def test_json_inside_of_texts_has_no_depth_that_is_an_error_of_the_server(client: httpx.Client) -> None:
    for depth in (200, 100_000):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": _nested(depth)}}
        result = {"role": "tool", "tool_call_id": "a", "content": _nested(depth)}
        user, asked = {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}
        for messages in ([user, asked, result], [user, asked | {"tool_calls": [call]}]):
            reply = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
            assert reply.status_code < 500, (depth, reply.text)
    for kind in ("json_schema", "structural_tag"):
        params = {"max_new_tokens": 1, kind: _nested(100_000)}
        reply = client.post("/generate", json={"text": "<bos>", "sampling_params": params})
        assert reply.status_code == 400, reply.text
    assert client.get("/health_generate").status_code == 200
