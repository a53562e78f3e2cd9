"""From resolved server arguments to the worker the scheduler drives."""

from __future__ import annotations

from sglang.srt.configs.registries import (
    ATTENTION_BACKENDS,
    OVERLAPPED_ALGORITHMS,
    SPECULATIVE_ALGORITHMS,
    load_entry,
)
from sglang.srt.distributed.parallel_state import TpGroup
from sglang.srt.managers.memory_probe import Workload, measure_reserve_bytes
from sglang.srt.managers.model_worker import ModelWorker
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.cuda_graph_runner import batch_sizes
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_configurator import build_kv_memory
from sglang.srt.model_executor.prefill_programs import prefill_sizes
from sglang.srt.models.gemma4_mtp import check_pair
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.device import make_device
from sglang.srt.utils.hf_transformers.config import load_model_config


def create_worker(args: ServerArgs, group: TpGroup | None = None) -> ModelWorker:
    """The worker of this process's rank. ``args`` must be resolved.

    ``ValueError`` for what a user can mend; the pair is checked before weights load.
    """
    assert args.attention_backend is not None, "resolve_server_args has not run"
    group = group or TpGroup()
    device = make_device(args.device, group.local_rank)
    load, spec = args.load_config(), args.spec_config()
    config = load_model_config(load.model_path, overrides=load.overrides, trust_remote_code=load.trust_remote_code)
    draft_load, draft_config = None, None
    if spec is not None:
        draft_load = args.draft_load_config()
        draft_config = load_model_config(
            draft_load.model_path, overrides=draft_load.overrides, trust_remote_code=draft_load.trust_remote_code
        )
        check_pair(config, draft_config)
    runner = ModelRunner(config, load, device, group)
    draft_runner = None
    if draft_config is not None and draft_load is not None:
        draft_runner = ModelRunner(draft_config, draft_load, device, group)
    width = 1 if spec is None else spec.num_draft_tokens
    make_backend, graphs = load_entry(ATTENTION_BACKENDS, args.attention_backend), args.graph_config()
    reserve_bytes = 0
    if device.kind == "cuda" and args.max_total_tokens is None:
        reserve_bytes = measure_reserve_bytes(runner, make_backend, args.memory_config(), _workload(args, width))
    memory = build_kv_memory(
        runner.kv_layout,
        args.memory_config(),
        tokens_per_step=width,
        dtype=runner.dtype,
        device=device,
        reserve_bytes=reserve_bytes,
        group=group,
    )
    backend = make_backend(memory.req_to_token)
    if spec is None or draft_runner is None:
        worker = TpModelWorker(runner, memory, backend, graphs=graphs)
    else:
        target = TpModelWorker(runner, memory, backend, capture_hidden=True, graphs=graphs, decodes=False)
        workers = OVERLAPPED_ALGORITHMS if graphs.overlap else SPECULATIVE_ALGORITHMS
        worker = load_entry(workers, spec.algorithm)(draft_runner, target, backend, spec, graphs)
    worker.capture_graphs()
    return worker


def _workload(args: ServerArgs, width: int) -> Workload:
    """The largest forwards these arguments allow."""
    schedule, graphs, memory = args.schedule_config(), args.graph_config(), args.memory_config()
    prefill_tokens = schedule.chunked_prefill_size or max(memory.context_length, schedule.max_prefill_tokens)
    sizes = batch_sizes(graphs, memory.max_running_requests or graphs.max_size).sizes
    batch_size = sizes[-1] if sizes else min(graphs.max_size, memory.max_running_requests or graphs.max_size)
    of_prompts = prefill_sizes(graphs)
    num_graphs = 2 * len(sizes) + len(of_prompts)
    return Workload(prefill_tokens, batch_size, width, num_graphs, of_prompts)
