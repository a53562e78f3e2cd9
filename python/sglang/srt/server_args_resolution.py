"""From ``ServerArgs`` as given to ``ServerArgs`` in which all is settled that can be known before the engine starts."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ARG_SPECS, ServerArgs, _resolve_speculative_algorithm_alias
from sglang.srt.server_args_grammar import resolve_grammar_backend
from sglang.srt.server_args_parallel import check_parallel
from sglang.srt.server_args_parsers import resolve_parsers
from sglang.srt.server_args_speculative import (
    check_tree,
    complete_shape,
    default_num_steps,
    draft_missing,
    longest_adaptive,
)
from sglang.srt.utils.device import make_device
from sglang.srt.utils.hf_transformers.config import load_model_config
from sglang.srt.utils.hf_transformers.hub import embedded_assistant, resolve_model_path

logger = logging.getLogger(__name__)

_DEFAULT_MAX_GRAPH_BS = 256
_MAX_PREFILL_GRAPH_TOKENS = 2048  # more are bound by arithmetic, not by the host


def resolve_server_args(args: ServerArgs) -> ServerArgs:
    """A copy in which everything that can be known before the engine starts is filled in. Idempotent.

    Paths become local directories (a Hugging Face id is downloaded here), the type, device and sizes are settled, and
    the speculative algorithm is the one that runs. Raises ``ValueError`` naming flags for what does not fit together.
    """
    model_path = resolve_model_path(args.model_path, args.revision, role="model", weights=args.load_format != "dummy")
    try:
        config = load_model_config(model_path, overrides=args.model_overrides, trust_remote_code=args.trust_remote_code)
    except ValueError as err:
        raise ValueError(f"--model-path {args.model_path!r}: {err}") from err
    if config.is_assistant:
        raise ValueError(
            f"--model-path {args.model_path!r} is an assistant ({config.architecture}), which cannot answer by itself: "
            "give its target there, and the assistant as --speculative-draft-model-path"
        )
    check_parallel(
        config.text,
        tp_size=args.tp_size,
        dp_size=args.dp_size,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        dist_init_addr=args.dist_init_addr,
    )
    device = make_device(args.device).kind
    resolved = args.derive(
        model_path=str(model_path),
        served_model_name=args.served_model_name or args.model_path,
        tokenizer_path=_resolve_tokenizer_path(args, model_path),
        chat_template=_resolve_chat_template(args.chat_template),
        update_weights_dir=_resolve_update_dir(args.update_weights_dir),
        device=device,
        dtype=_resolve_dtype(args.dtype, device, config),
        random_seed=secrets.randbelow(1 << 30) if args.random_seed is None else args.random_seed,
        grammar_backend=resolve_grammar_backend(args.grammar_backend),
        attention_backend=args.attention_backend or ("triton" if device == "cuda" else "torch_native"),
        **resolve_parsers(args.reasoning_parser, args.tool_call_parser, config.architecture),
        **_resolve_sizes(args, device, config),
    )
    return _resolve_speculation(_resolve_graphs(resolved), config)


def _resolve_tokenizer_path(args: ServerArgs, model_path: Path) -> str:
    if args.tokenizer_path is None or args.tokenizer_path == args.model_path:
        return str(model_path)
    return str(resolve_model_path(args.tokenizer_path, None, role="tokenizer", weights=False))


def _resolve_chat_template(chat_template: str | None) -> str | None:
    if chat_template is None:
        return None
    file = Path(chat_template).expanduser()
    if not file.is_file():
        raise ValueError(f"--chat-template {chat_template!r} is not a file: give the path of a Jinja template")
    return str(file.resolve())


def _resolve_update_dir(folder: str | None) -> str | None:
    if folder is None:
        return None
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"--update-weights-dir {folder!r} is not a directory: give one that exists")
    return str(path.resolve())


def _resolve_dtype(dtype: str, device: str, config: ModelConfig) -> str:
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else config.dtype


def _resolve_sizes(args: ServerArgs, device: str, config: ModelConfig) -> dict[str, Any]:
    on_cpu = device == "cpu"
    context_length = config.context_length if args.context_length is None else args.context_length
    if context_length > config.context_length:
        raise ValueError(
            f"--context-length {context_length} exceeds the model's max_position_embeddings, {config.context_length}: "
            "use at most that, or raise max_position_embeddings with --json-model-override-args"
        )
    chunk = args.chunked_prefill_size
    if chunk is None:
        # the default gives way to the page size; a value that was asked for does not
        chunk = -(-(2048 if on_cpu else 8192) // args.page_size) * args.page_size
    elif chunk != -1 and chunk % args.page_size:
        raise ValueError(f"--chunked-prefill-size {chunk} must be a multiple of --page-size {args.page_size}, or -1")
    if args.max_total_tokens is not None and args.max_total_tokens < args.page_size:
        raise ValueError(f"--max-total-tokens {args.max_total_tokens} is below --page-size {args.page_size}: raise it")
    watchdog_s = (3600.0 if on_cpu else 300.0) if args.watchdog_timeout is None else args.watchdog_timeout
    fraction = (0.25 if on_cpu else 0.9) if args.mem_fraction_static is None else args.mem_fraction_static
    return {
        "context_length": context_length,
        "chunked_prefill_size": chunk,
        "mem_fraction_static": fraction,
        "watchdog_timeout": watchdog_s,
    }


def _resolve_graphs(args: ServerArgs) -> ServerArgs:
    chunk = args.chunked_prefill_size
    assert chunk is not None
    most_tokens = _MAX_PREFILL_GRAPH_TOKENS if chunk == -1 else min(chunk, _MAX_PREFILL_GRAPH_TOKENS)
    # the torch backend plans on the host, which no captured step can do
    can_capture = args.device == "cuda" and args.attention_backend != "torch_native"
    return args.derive(
        cuda_graph_max_bs=_largest_graph(args, "cuda_graph_bs", "cuda_graph_max_bs", _DEFAULT_MAX_GRAPH_BS),
        piecewise_cuda_graph_max_tokens=_largest_graph(
            args, "piecewise_cuda_graph_tokens", "piecewise_cuda_graph_max_tokens", most_tokens
        ),
        disable_cuda_graph=args.disable_cuda_graph or not can_capture,
    )


def _largest_graph(args: ServerArgs, sizes_name: str, bound_name: str, default: int) -> int:
    """The bound that was given, else the largest of the sizes that were, else ``default``."""
    sizes, given = getattr(args, sizes_name), getattr(args, bound_name)
    largest = None if sizes is None else max(sizes)
    bound: int = given or largest or default
    if largest is not None and largest > bound:
        raise ValueError(
            f"{ARG_SPECS[sizes_name].flag} has {largest}, which is above {ARG_SPECS[bound_name].flag} {bound}: leave "
            "out one of the two"
        )
    return bound


_SPEC_SETTINGS = (
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_adaptive",
    "speculative_use_rejection_sampling",
)


def _resolve_speculation(args: ServerArgs, config: ModelConfig) -> ServerArgs:
    if args.speculative_algorithm is None:
        for name in _SPEC_SETTINGS:
            if getattr(args, name) not in (None, False):
                raise ValueError(
                    f"{ARG_SPECS[name].flag} {getattr(args, name)!r} is given without --speculative-algorithm: add "
                    "--speculative-algorithm FROZEN_KV_MTP or leave it out"
                )
        return args
    draft = _resolve_draft_path(args)
    algorithm = _resolve_speculative_algorithm_alias(args.speculative_algorithm, draft, args.trust_remote_code)
    try:
        load_model_config(Path(draft), overrides={}, trust_remote_code=args.trust_remote_code)
    except ValueError as err:
        raise ValueError(f"--speculative-draft-model-path {draft!r}: {err}") from err
    assert args.context_length is not None
    default, reason = default_num_steps(config.text)
    adaptive = _resolve_adaptive(args)
    if adaptive:
        default, reason = longest_adaptive(default, reason, args.context_length)
    steps, topk, tokens = complete_shape(
        args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens, default
    )
    if args.speculative_num_steps is None and args.speculative_num_draft_tokens is None:
        logger.info("--speculative-num-steps is %d, %s", steps, reason)
    if tokens >= args.context_length:
        raise ValueError(
            f"--speculative-num-steps {steps} does not fit the context of {args.context_length} tokens: lower it"
        )
    if topk > 1:
        if adaptive:
            raise ValueError(
                f"--speculative-adaptive chooses the length of chains, and --speculative-eagle-topk {topk} asks for "
                "trees: leave out one of the two"
            )
        check_tree(
            config.text,
            steps,
            topk,
            tokens,
            attention_backend=args.attention_backend,
            sampled=args.speculative_use_rejection_sampling,
        )
    return args.derive(
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tokens,
        speculative_adaptive=adaptive,
    )


def _resolve_adaptive(args: ServerArgs) -> bool:
    """On by default where it was measured not to lose: one process on a CPU. Not where a length was asked for, nor for
    drawn drafts, of which a seed draws the same only in rounds of one length."""
    if args.speculative_adaptive is not None:
        return args.speculative_adaptive
    length_given = args.speculative_num_steps is not None or args.speculative_num_draft_tokens is not None
    chains = args.speculative_eagle_topk in (None, 1) and not args.speculative_use_rejection_sampling
    return chains and not length_given and args.device == "cpu" and args.tp_size == 1


def _resolve_draft_path(args: ServerArgs) -> str:
    """Local directory of the draft model."""
    given = args.speculative_draft_model_path
    if given is not None:
        weights = args.load_format != "dummy"
        return str(resolve_model_path(given, args.speculative_draft_model_revision, role="draft", weights=weights))
    shipped = embedded_assistant(args.model_path)
    if shipped is None:
        raise ValueError(draft_missing(args.speculative_algorithm))
    return str(shipped)
