"""``ServerArgs``: what a server is told, from the command line or as keywords, and what follows from it.

A value from birth: made by ``prepare_server_args`` or by keyword, completed once by ``resolve_server_args`` of
``server_args_resolution``, cut by ``server_args_cut`` into the narrow slices of ``server_args_slices``, and never
assigned to.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from types import MappingProxyType
from typing import Any, get_args

from sglang.srt.configs.model_config_parser import ASSISTANT_ARCHITECTURES, DTYPES
from sglang.srt.configs.registries import ATTENTION_BACKENDS, GRAMMAR_BACKENDS, OUTPUT_FORMATS
from sglang.srt.server_args_cli import closest, parse_command_line
from sglang.srt.server_args_cut import ServerArgsCut, parse_overrides
from sglang.srt.server_args_fields import ArgSpec, arg, specs_of
from sglang.srt.server_args_parallel import LoadBalanceMethod
from sglang.srt.server_args_ports import PortArgs
from sglang.srt.server_args_slices import GraphConfig, LoadConfig, MemoryConfig, ScheduleConfig, SpecConfig
from sglang.srt.server_args_speculative import draft_missing
from sglang.srt.server_args_unsupported import UNSUPPORTED_FLAGS
from sglang.srt.utils.hf_transformers.config import load_architecture
from sglang.srt.utils.hf_transformers.hub import resolve_model_path
from sglang.srt.utils.log import LOG_LEVELS

__all__ = [
    "GraphConfig",
    "LoadConfig",
    "MemoryConfig",
    "PortArgs",
    "ScheduleConfig",
    "ServerArgs",
    "SpecConfig",
    "prepare_server_args",
]

logger = logging.getLogger(__name__)

_INT32_MAX = (1 << 31) - 1
_ORIGIN = re.compile(r"https?://[^/?#\s*]+")
_MODEL, _HTTP, _MEMORY = "Model and tokenizer", "HTTP server", "Memory and scheduling"
_RUNTIME, _LOG, _API, _SPEC = "Runtime", "Logging", "API", "Speculative decoding"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs(ServerArgsCut):
    """Every setting of one server; names and flags are sglang's.

    Making one checks each value by itself and raises ``ValueError`` naming the flag, its value and what is allowed.
    None means "to be derived"; ``resolve_server_args`` fills in what can be derived before the engine starts.
    """

    model_path: str = arg(
        MISSING,
        "Directory of a checkpoint, Hugging Face id, or name of an embedded model (tiny-gemma4).",
        "text",
        _MODEL,
        names=("--model",),
    )
    tokenizer_path: str | None = arg(
        None,
        "Directory or Hugging Face id of the tokenizer.",
        "text",
        _MODEL,
        default_note="the model's",
    )
    load_format: str = arg(
        "auto",
        "auto and safetensors read safetensors files; dummy fills the weights with random numbers.",
        "text",
        _MODEL,
        choices=("auto", "safetensors", "dummy"),
    )
    json_model_override_args: str = arg(
        "{}",
        "JSON object of values that replace those of the target's config.json, like '{\"sliding_window\": 256}'.",
        "text",
        _MODEL,
    )
    dtype: str = arg(
        "auto",
        "Type to compute in, for weights and KV. auto is the checkpoint's type on CUDA; a CPU computes in float32 "
        "unless this says otherwise.",
        "text",
        _MODEL,
        choices=("auto", *DTYPES),
        synonyms=(("half", "float16"), ("float", "float32")),
    )
    context_length: int | None = arg(
        None,
        "Longest sequence of prompt and answer, in tokens; at most the model's max_position_embeddings.",
        "integer",
        _MODEL,
        low=2,
        high=_INT32_MAX,
        default_note="the model's max_position_embeddings",
    )
    revision: str | None = arg(
        None,
        "Branch, tag or commit of a model that is given as a Hugging Face id.",
        "text",
        _MODEL,
        default_note="the main branch",
    )
    trust_remote_code: bool = arg(
        False,
        "Accept checkpoints that bring their own code. A tokenizer's code is run; a model's code never is, the "
        "built-in class loads its weights.",
        "flag",
        _MODEL,
    )
    host: str = arg("127.0.0.1", "Address to listen on.", "text", _HTTP)
    port: int = arg(30000, "Port to listen on.", "integer", _HTTP, low=1, high=65535)
    skip_server_warmup: bool = arg(
        False, "Do not send a request to the engine before the server is ready.", "flag", _HTTP
    )
    shutdown_timeout: float = arg(
        5.0,
        "Seconds that running requests have to finish after SIGTERM or SIGINT; then they are aborted, and streams end "
        "with an event that says so. A second signal aborts them at once.",
        "number",
        _HTTP,
        low=0.0,
        high=86400.0,
    )
    allowed_origins: str | None = arg(
        None,
        "Origins whose web pages may call the server (CORS), separated by commas, like https://chat.example.org; * is "
        "any.",
        "text",
        _HTTP,
        default_note="none",
    )
    update_weights_dir: str | None = arg(
        None,
        "Directory under which /update_weights_from_disk finds checkpoints.",
        "text",
        _HTTP,
        default_note="the model's own directory, and the assistant's for the assistant",
    )
    mem_fraction_static: float | None = arg(
        None,
        "Part of a GPU's memory that weights and KV pool take together; on a CPU, part of the memory that is free "
        "after the weights are loaded which the KV pool may take.",
        "number",
        _MEMORY,
        above=0.0,
        high=1.0,
        default_note="0.25 on CPU, 0.9 on CUDA",
    )
    max_total_tokens: int | None = arg(
        None,
        "Size of the KV pool in tokens; can only make it smaller than --mem-fraction-static allows.",
        "integer",
        _MEMORY,
        low=1,
        high=_INT32_MAX,
        default_note="as many as fit",
    )
    max_running_requests: int | None = arg(
        None,
        "Most requests that run at once.",
        "integer",
        _MEMORY,
        low=1,
        high=1 << 16,
        default_note="derived from the size of the KV pool",
    )
    max_queued_requests: int | None = arg(
        None,
        "Most requests that wait; one more is answered with status 503.",
        "integer",
        _MEMORY,
        low=1,
        high=_INT32_MAX,
        default_note="no limit",
    )
    chunked_prefill_size: int | None = arg(
        None,
        "Longer prompts are prefilled in chunks of this many tokens; -1 never cuts a prompt.",
        "integer",
        _MEMORY,
        low=1,
        high=_INT32_MAX,
        also=-1,
        default_note="2048 on CPU, 8192 on CUDA",
    )
    enable_mixed_chunk: bool = arg(
        False,
        "Compute prompts and the tokens of running requests in one pass, so that streams do not wait for prefills.",
        "flag",
        _MEMORY,
    )
    max_prefill_tokens: int = arg(
        16384,
        "Most prompt tokens of one prefill step. A prompt that is longer runs alone.",
        "integer",
        _MEMORY,
        low=1,
        high=_INT32_MAX,
    )
    schedule_policy: str = arg(
        "fcfs",
        "Order of waiting requests: first come first served, longest cached prefix, longest output, or random.",
        "text",
        _MEMORY,
        choices=("fcfs", "lpm", "lof", "random"),
    )
    schedule_conservativeness: float = arg(
        1.0,
        "How much room admission keeps for answers still growing; raise it when requests are retracted often.",
        "number",
        _MEMORY,
        above=0.0,
        high=100.0,
    )
    page_size: int = arg(1, "Tokens per page of the KV pool.", "integer", _MEMORY, low=1, high=1024)
    disable_radix_cache: bool = arg(False, "Do not reuse the KV of prefixes that requests share.", "flag", _MEMORY)
    tp_size: int = arg(
        1,
        "Processes, each with a device of its own, that share one model (tensor parallelism).",
        "integer",
        _RUNTIME,
        names=("--tp", "--tensor-parallel-size"),
        low=1,
        high=1024,
    )
    dp_size: int = arg(
        1,
        "Replicas of the model behind one port, each of --tp-size processes with devices of their own. On a CPU they "
        "share memory and cores equally.",
        "integer",
        _RUNTIME,
        names=("--dp", "--data-parallel-size"),
        low=1,
        high=1024,
    )
    load_balance_method: LoadBalanceMethod = arg(
        "auto",
        "Which replica takes a request. auto: the one that owes the fewest tokens, where those of the prompt do not "
        "count that it has seen before. round_robin: each in turn.",
        "text",
        _RUNTIME,
        choices=get_args(LoadBalanceMethod),
        synonyms=(("total_tokens", "auto"), ("minimum_tokens", "auto")),
    )
    nnodes: int = arg(1, "Machines that the processes are spread over.", "integer", _RUNTIME, low=1, high=1024)
    node_rank: int = arg(
        0,
        "Which of the machines this is. Machine 0 serves; the others only compute.",
        "integer",
        _RUNTIME,
        low=0,
        high=1023,
    )
    dist_init_addr: str | None = arg(
        None,
        "HOST:PORT of machine 0, where the processes meet. The network between the machines must be a trusted one.",
        "text",
        _RUNTIME,
        names=("--nccl-init-addr",),
        default_note="one machine needs none",
    )
    dist_timeout: int = arg(
        600,
        "Seconds that processes wait for each other in one exchange, as at the start.",
        "integer",
        _RUNTIME,
        low=1,
        high=_INT32_MAX,
    )
    disable_custom_all_reduce: bool = arg(
        False,
        "Add what GPUs exchange with NCCL only, small tensors too.",
        "flag",
        _RUNTIME,
    )
    device: str = arg(
        "auto",
        "Where to compute; auto takes CUDA when it is usable.",
        "text",
        _RUNTIME,
        choices=("auto", "cpu", "cuda"),
    )
    attention_backend: str | None = arg(
        None,
        "Implementation of attention.",
        "text",
        _RUNTIME,
        choices=tuple(ATTENTION_BACKENDS),
        default_note="triton on CUDA, torch_native on a CPU",
    )
    disable_cuda_graph: bool = arg(
        False,
        "Do not capture decode steps as CUDA graphs. Nothing is captured on a CPU, or with torch_native attention.",
        "flag",
        _RUNTIME,
    )
    cuda_graph_max_bs: int | None = arg(
        None,
        "Largest batch that is captured as a CUDA graph; larger ones run kernel by kernel.",
        "integer",
        _RUNTIME,
        low=1,
        high=1 << 16,
        default_note="256, or the largest of --cuda-graph-bs",
    )
    cuda_graph_bs: tuple[int, ...] | None = arg(
        None,
        "Batch sizes that are captured as CUDA graphs; a batch is padded to the next. Where nothing is captured they "
        "only pad.",
        "integers",
        _RUNTIME,
        low=1,
        high=1 << 16,
        default_note="1 to 8, then every 8th to 64, then every 16th",
    )
    disable_cuda_graph_padding: bool = arg(
        False, "Run only batches of exactly a captured size as CUDA graphs.", "flag", _RUNTIME
    )
    disable_piecewise_cuda_graph: bool = arg(
        False, "Do not run steps of prompts as CUDA graphs, only decode steps.", "flag", _RUNTIME
    )
    piecewise_cuda_graph_max_tokens: int | None = arg(
        None,
        "Most tokens of prompts that one CUDA graph computes; larger steps run kernel by kernel.",
        "integer",
        _RUNTIME,
        low=1,
        high=1 << 16,
        default_note="2048 and at most the chunked prefill size, or the largest of --piecewise-cuda-graph-tokens",
    )
    piecewise_cuda_graph_tokens: tuple[int, ...] | None = arg(
        None,
        "Numbers of prompt tokens that are captured as CUDA graphs; a step is padded to the next. Where nothing is "
        "captured they only pad.",
        "integers",
        _RUNTIME,
        low=1,
        high=1 << 16,
        default_note="16, 32, 64, then at most a quarter apart",
    )
    disable_overlap_schedule: bool = arg(
        False,
        "Start a decode step only when the result of the one before it has been read. By default steps that run as "
        "CUDA graphs are started one ahead.",
        "flag",
        _RUNTIME,
    )
    enable_deterministic_inference: bool = arg(
        False,
        "On CUDA, compute every row of a matrix product alike however many rows are computed at once, so that "
        "speculative and plain output are bitwise equal at every batch size. A CPU always does.",
        "flag",
        _RUNTIME,
    )
    watchdog_timeout: float | None = arg(
        None,
        "Seconds that one stage of the scheduler's loop may take. Then it hangs: the stage and all stacks are logged, "
        "and the server ends.",
        "number",
        _RUNTIME,
        above=0.0,
        high=86400.0,
        default_note="300 on CUDA, 3600 on a CPU",
    )
    soft_watchdog_timeout: float | None = arg(
        None,
        "As --watchdog-timeout, but the server goes on.",
        "number",
        _RUNTIME,
        above=0.0,
        high=86400.0,
        default_note="no such limit",
    )
    random_seed: int | None = arg(
        None,
        "Seed of sampling for requests that bring none.",
        "integer",
        _RUNTIME,
        low=0,
        high=_INT32_MAX,
        default_note="drawn once at start",
    )
    stream_interval: int = arg(1, "Tokens between two pieces of a stream.", "integer", _RUNTIME, low=1, high=_INT32_MAX)
    log_level: str = arg("info", "Least severe records to log.", "text", _LOG, choices=LOG_LEVELS)
    enable_metrics: bool = arg(False, "Let the HTTP server answer /metrics, for Prometheus.", "flag", _LOG)
    log_requests: bool = arg(False, "Log every request when it arrives and when it ends.", "flag", _LOG)
    log_requests_level: int = arg(
        1,
        "What lines of --log-requests hold. 0: ids, lengths, times and finish reasons. 1: sampling controls too. 2: "
        "the first 2048 characters of prompts and answers too. 3: all of them.",
        "integer",
        _LOG,
        low=0,
        high=3,
    )
    log_requests_format: str = arg(
        "text",
        "Form of lines of --log-requests: like other lines, or one JSON object each.",
        "text",
        _LOG,
        choices=("text", "json"),
    )
    decode_log_interval: int = arg(
        40, "Decode steps between two lines of statistics.", "integer", _LOG, low=1, high=_INT32_MAX
    )
    api_key: str | None = arg(
        None,
        "Key that clients must send as a bearer token.",
        "text",
        _API,
        default_note="no key",
        secret=True,
    )
    admin_api_key: str | None = arg(
        None,
        "Key that routes which act on the whole server ask for instead of --api-key; it opens every other route too.",
        "text",
        _API,
        default_note="--api-key opens every route",
        secret=True,
    )
    served_model_name: str | None = arg(
        None,
        "Model name in replies and in /v1/models.",
        "text",
        _API,
        default_note="--model-path as given",
    )
    chat_template: str | None = arg(
        None,
        "File with a Jinja chat template.",
        "text",
        _API,
        default_note="the tokenizer's",
    )
    allow_auto_truncate: bool = arg(
        False,
        "Cut prompts that do not fit to their beginning, and lengths to what the context leaves, instead of refusing "
        "the request.",
        "flag",
        _API,
    )
    enable_cache_report: bool = arg(False, "Report cached prompt tokens in the usage of OpenAI replies.", "flag", _API)
    sampling_defaults: str = arg(
        "model",
        "Source of sampling values that requests leave out: the model's generation_config.json, or OpenAI's defaults.",
        "text",
        _API,
        choices=("model", "openai"),
    )
    reasoning_parser: str | None = arg(
        None,
        "How thoughts are told from answers in chats; none leaves them in the text.",
        "text",
        _API,
        choices=(*OUTPUT_FORMATS, "none"),
        default_note="the model's",
    )
    tool_call_parser: str | None = arg(
        None,
        "How calls of tools are read from answers in chats; none leaves them in the text.",
        "text",
        _API,
        choices=(*OUTPUT_FORMATS, "none"),
        default_note="the model's",
    )
    grammar_backend: str | None = arg(
        None,
        "What holds answers to a JSON schema, a regular expression, EBNF or a structural tag; none refuses requests "
        "that ask for it.",
        "text",
        _API,
        choices=(*GRAMMAR_BACKENDS, "none"),
        default_note="xgrammar where it is installed, none elsewhere",
    )
    constrained_json_whitespace_pattern: str | None = arg(
        None,
        "White space that constrained JSON may have between its parts: a regular expression of white-space characters "
        "with *, ? or {0,N} behind, like '[ \\n\\t]*'.",
        "text",
        _API,
        default_note="none but what json.dumps writes on one line",
    )
    constrained_json_disable_any_whitespace: bool = arg(
        False, "Constrained JSON is one line as json.dumps writes it, which is the default.", "flag", _API
    )
    enable_custom_logit_processor: bool = arg(
        False,
        "Run logit processors that requests bring. Their code runs in the server: only for clients that are trusted.",
        "flag",
        _API,
    )
    enable_return_hidden_states: bool = arg(False, "Let requests ask for hidden states.", "flag", _API)
    speculative_algorithm: str | None = arg(
        None,
        "Draft tokens with an assistant. NEXTN and EAGLE mean FROZEN_KV_MTP when the draft is a Gemma 4 assistant.",
        "text",
        _SPEC,
        choices=("FROZEN_KV_MTP", "NEXTN", "EAGLE", "EAGLE3"),
        default_note="no speculation",
    )
    speculative_draft_model_path: str | None = arg(
        None,
        "Directory or Hugging Face id of the assistant.",
        "text",
        _SPEC,
        names=("--speculative-draft-model",),
        default_note="the embedded model's assistant",
    )
    speculative_draft_model_revision: str | None = arg(
        None,
        "Branch, tag or commit of an assistant that is given as a Hugging Face id.",
        "text",
        _SPEC,
        default_note="the main branch",
    )
    speculative_num_steps: int | None = arg(
        None,
        "Tokens drafted per round, or the most if --speculative-adaptive is on. If given, it is off by default.",
        "integer",
        _SPEC,
        low=1,
        high=1024,
        default_note="by target: E2B 2, E4B 3, 12B 4, 26B-A4B 3, 31B 5, tiny-gemma4 4, others 3; if adaptive 3 more",
    )
    speculative_eagle_topk: int | None = arg(
        None,
        "Branches drafted after a token. Above 1 the drafts are a tree.",
        "integer",
        _SPEC,
        low=1,
        high=16,
        default_note="1",
    )
    speculative_num_draft_tokens: int | None = arg(
        None,
        "Tokens verified per round: those drafted, or the best of them in a tree, and the one before them.",
        "integer",
        _SPEC,
        low=2,
        high=1025,
        default_note="--speculative-num-steps + 1; a tree: one and top-k per step, at most 16",
    )
    speculative_adaptive: bool | None = arg(
        None,
        "Draft from no token to --speculative-num-steps tokens per round: the length that promises most tokens per "
        "second by what rounds cost here and what requests accept.",
        "flag",
        _SPEC,
        default_note="on for chains of no given length on one CPU process, unless they are drawn",
    )
    speculative_use_rejection_sampling: bool = arg(
        False,
        "Draw drafts instead of taking the best, and accept them by min(1, p / q): more are accepted at higher "
        "temperatures. Answers are distributed as without speculation; a seed gives another one of them. Chains only.",
        "flag",
        _SPEC,
    )
    speculative_accept_threshold_single: float = arg(
        1.0,
        "Only 1.0, which is exact; lower values would accept tokens the target does not choose.",
        "number",
        _SPEC,
        low=0.0,
        high=1.0,
    )
    speculative_accept_threshold_acc: float = arg(
        1.0,
        "Only 1.0, which is exact; lower values would accept tokens the target does not choose.",
        "number",
        _SPEC,
        low=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        for name, spec in ARG_SPECS.items():
            value = spec.normalise(getattr(self, name))
            spec.check(value)
            # the only write, before anyone else sees the object
            object.__setattr__(self, name, value)
        parse_overrides(self.json_model_override_args)
        self.grammar_config()
        _parse_origins(self.allowed_origins)
        for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
            if getattr(self, name) != 1.0:
                raise ValueError(
                    f"{ARG_SPECS[name].flag} {getattr(self, name)} would change the model's answers: verification is "
                    "exact, use 1.0 or leave it out"
                )

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> ServerArgs:
        """Make one from keywords, as ``Engine`` takes them; unsupported flags of sglang are refused alike."""
        given = dict(kwargs)
        for name in kwargs:
            refused = UNSUPPORTED_FLAGS.get("--" + name.replace("_", "-"))
            if refused is not None:
                value = given.pop(name)
                if value is not None and value is not False:
                    refused.check("" if value is True else str(value))
            elif name not in ARG_SPECS:
                raise ValueError(f"unknown argument {name!r}{closest(name, ARG_SPECS)}")
        if "model_path" not in given:
            raise ValueError(_MODEL_PATH_MISSING)
        return cls(**given)

    def derive(self, **changes: Any) -> ServerArgs:
        """A copy with other values, checked like any other."""
        return dataclasses.replace(self, **changes)

    def public_dict(self) -> dict[str, Any]:
        """Field name -> value, without secrets."""
        return {name: getattr(self, name) for name, spec in ARG_SPECS.items() if not spec.secret}

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """``allowed_origins`` one by one."""
        return _parse_origins(self.allowed_origins)


ARG_SPECS: Mapping[str, ArgSpec] = MappingProxyType(specs_of(ServerArgs))

_MODEL_PATH_MISSING = (
    "--model-path is missing: give a directory, a Hugging Face id, or tiny-gemma4, which ships with the package"
)


def prepare_server_args(argv: Sequence[str]) -> ServerArgs:
    """Parse the command line (without the program's name).

    Raises ``ValueError`` in one sentence for an unknown flag, a flag that is known but not supported, or a bad value;
    ``--help`` prints the help and exits.
    """
    given = parse_command_line(argv, ARG_SPECS, {field.name: field.default for field in dataclasses.fields(ServerArgs)})
    if "model_path" not in given:
        raise ValueError(_MODEL_PATH_MISSING)
    return ServerArgs(**given)


def _parse_origins(text: str | None) -> tuple[str, ...]:
    origins = tuple(part.strip() for part in (text or "").split(",") if part.strip())
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{ARG_SPECS['allowed_origins'].flag} has {origin!r:.200}, which is no origin: give scheme and host, "
                "like https://chat.example.org, without a path, or *"
            )
    return origins


def _resolve_speculative_algorithm_alias(
    algorithm: str | None, draft_model_path: str | None, trust_remote_code: bool
) -> str | None:
    """The algorithm that runs when ``algorithm`` is asked for with this draft model; None stays None.

    NEXTN and EAGLE with a Gemma 4 assistant are FROZEN_KV_MTP. EAGLE3 with one, and any algorithm with another kind of
    draft model, is a ``ValueError`` that names both flags.
    """
    if algorithm is None:
        return None
    if draft_model_path is None:
        raise ValueError(draft_missing(algorithm))
    flags = f"--speculative-algorithm {algorithm} with --speculative-draft-model-path {str(draft_model_path)!r}"
    path = resolve_model_path(str(draft_model_path), None, role="draft", weights=False)
    try:
        architecture = load_architecture(path, trust_remote_code=trust_remote_code)
    except ValueError as err:
        raise ValueError(f"{flags}: {err}") from err
    if architecture not in ASSISTANT_ARCHITECTURES:
        raise ValueError(
            f"{flags} is not supported: the draft model is {architecture or 'of no named architecture'}, and only "
            f"FROZEN_KV_MTP with a Gemma 4 assistant ({' or '.join(ASSISTANT_ARCHITECTURES)}) is available"
        )
    if algorithm == "EAGLE3":
        raise ValueError(f"{flags} is not possible: the draft model is a Gemma 4 assistant, use FROZEN_KV_MTP")
    return "FROZEN_KV_MTP"
