"""How much of a GPU forwards take, measured before the KV pool takes what is left."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.kv_manager import RequestKV
from sglang.srt.mem_cache.prefix_cache import PrefixHandle
from sglang.srt.model_executor.cuda_graph_runner import GraphProgram, Step, StepKind
from sglang.srt.model_executor.decode_programs import (
    WIDTH,
    StepBuffers,
    TargetDecodeProgram,
    TargetVerifyProgram,
    VerifyBuffers,
)
from sglang.srt.model_executor.decode_rows import ResidentRows
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.input_buffers import ROWS
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_configurator import KVMemory, build_kv_memory
from sglang.srt.model_executor.prefill_programs import PrefillSteps
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args_slices import MemoryConfig

logger = logging.getLogger(__name__)

# Beside what tensors take: a captured graph keeps its kernels' arguments in the driver's memory, and libraries,
# compiled kernels and the gaps between blocks of the allocator take their share.
_GRAPH_BYTES = 8 << 20
_SLACK_BYTES = 768 << 20
_PARAMS = SamplingParams(temperature=1.0, top_k=64, top_p=0.95, min_p=0.01)  # everything a sampler can be asked for


@dataclass(frozen=True, slots=True)
class Workload:
    """The largest forwards an engine will run: ``prefill_tokens`` in one extend, ``width`` rows for each of
    ``batch_size`` requests in one decode step, and as many graphs as ``num_graphs``, among them one for each number of
    tokens in ``prefill_sizes``."""

    prefill_tokens: int
    batch_size: int
    width: int
    num_graphs: int
    prefill_sizes: tuple[int, ...]


def measure_reserve_bytes(
    runner: ModelRunner,
    make_backend: Callable[[torch.Tensor], AttentionBackend],
    config: MemoryConfig,
    load: Workload,
) -> int:
    """Run the largest extend and the largest decode step over a pool of a few tokens, whose contents do not matter.

    Captured steps keep their memory, which graphs share; steps that run as they are come on top. The assistant's
    forwards are small beside the target's.
    """
    tokens = (-(-2 * load.width // config.page_size) + 1) * config.page_size
    small = replace(config, max_total_tokens=tokens, max_running_requests=1)
    layout = runner.kv_layout
    memory = build_kv_memory(layout, small, tokens_per_step=load.width, dtype=runner.dtype, device=runner.device)
    backend = make_backend(memory.req_to_token)
    worker = TpModelWorker(runner, memory, backend, capture_hidden=load.width > 1)
    batch = _extend_batch(memory, load, runner.device.torch_device)
    program = _decode_program(runner, memory, backend, load)
    step = Step(load.batch_size, StepKind.SAMPLED, None, load.width)
    captured = 0
    with torch.inference_mode():
        try:
            extend = runner.device.peak_bytes(lambda: worker.extend(batch))
            decode = runner.device.peak_bytes(lambda: program.run(step))
            if load.prefill_sizes:
                prompts = PrefillSteps(runner, backend, memory, load.prefill_sizes, capture=False)
                largest = Step(load.prefill_sizes[-1], StepKind.GREEDY, None, 1)
                captured = runner.device.peak_bytes(lambda: prompts.runner.run(largest))
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a prefill of {load.prefill_tokens} tokens or a decode step of {load.batch_size} requests does not "
                "fit beside the weights: lower --chunked-prefill-size, --cuda-graph-max-bs or --context-length "
                f"({error})"
            ) from error
    reserve = extend + max(decode, captured) + load.num_graphs * _GRAPH_BYTES + _SLACK_BYTES
    logger.info(
        "Memory kept for forwards: %.0f MB (prefill of %d tokens %.0f MB, captured prefill %.0f MB, decode step of %d "
        "requests %.0f MB)",
        reserve / 1e6,
        load.prefill_tokens,
        extend / 1e6,
        captured / 1e6,
        load.batch_size,
        decode / 1e6,
    )
    return reserve


def _extend_batch(memory: KVMemory, load: Workload, device: torch.device) -> ScheduleBatch:
    """As many prompts as a decode step has requests, all in the slots of the dummy page."""
    num = min(load.batch_size, load.prefill_tokens)
    length = min(-(-load.prefill_tokens // num), memory.context_length)
    kv = RequestKV(memory.dummy_row, 0, 0, 0, allocated_len=length, prefix=PrefixHandle())
    req = Req("probe", array("i", [0]) * length, length, _PARAMS, 1, frozenset(), 0, False, 0.0, kv=kv)
    info = SamplingBatchInfo.from_params([_PARAMS] * num, [0] * num, device)
    return ScheduleBatch(ForwardMode.EXTEND, (req,) * num, (length,) * num, info, None)


def _decode_program(runner: ModelRunner, memory: KVMemory, backend: AttentionBackend, load: Workload) -> GraphProgram:
    device = runner.device.torch_device
    rows = ResidentRows(load.batch_size, memory.dummy_row, device).device
    sizes = {ROWS: load.batch_size, WIDTH: load.width, "result_width": load.width + 1}
    sizes["hidden"] = runner.config.text.hidden_size
    if load.width == 1:
        out = StepBuffers.allocate(sizes, runner.dtype, device)
        return TargetDecodeProgram(runner.model, backend, memory, rows, out)
    verify = VerifyBuffers.allocate(sizes, runner.dtype, device)
    return TargetVerifyProgram(runner.model, backend, memory, rows, verify)
