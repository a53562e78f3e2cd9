"""Flags of sglang that this engine knows and does not support, each with the reason that the user is told.

One table: reason -> flags. ``flag=value`` marks the value that asks for what happens here anyway (``flag=`` for a bare
switch, ``a|b`` for several), and is accepted without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class UnsupportedFlag:
    """One refused flag. ``accepted`` are the values (as text, "" for none) that change nothing and so are allowed."""

    flag: str
    reason: str
    accepted: tuple[str, ...]

    def check(self, value: str) -> None:
        """``ValueError`` in one sentence unless ``value`` asks for what happens anyway."""
        if value in self.accepted:
            return
        values = " or ".join(value for value in self.accepted if value)
        fix = f"leave it out or give {values}" if values else "leave it out"
        raise ValueError(f"{self.flag} is not supported: {self.reason}; {fix}")


_REASONS: tuple[tuple[str, str], ...] = (
    (
        "pipeline parallelism is not available yet",
        "pp-size=1 pipeline-parallel-size=1 pp-max-micro-batch-size pp-async-batch-depth=0",
    ),
    (
        "--dp-size makes whole replicas, whose loads are known from their replies",
        "load-watch-interval enable-dp-attention enable-dp-lm-head prefill-round-robin-balance "
        "enable-dp-attention-local-control-broadcast",
    ),
    ("processes find each other by --dist-init-addr, and NCCL's ports by themselves", "nccl-port"),
    (
        "expert parallelism is not available yet",
        "ep-size=1 expert-parallel-size=1 ep=1 moe-a2a-backend=none deepep-mode=auto deepep-config "
        "ep-num-redundant-experts=0 ep-dispatch-algorithm init-expert-location=trivial enable-eplb "
        "eplb-algorithm=auto eplb-rebalance-num-iterations eplb-rebalance-layers-per-chunk "
        "eplb-min-rebalancing-utilization-threshold expert-distribution-recorder-mode "
        "expert-distribution-recorder-buffer-size enable-expert-distribution-metrics moe-dense-tp-size=1 "
        "elastic-ep-backend=none mooncake-ib-device enable-two-batch-overlap enable-single-batch-overlap "
        "tbo-token-distribution-threshold",
    ),
    (
        "context parallelism is not available yet",
        "attention-context-parallel-size=1 attn-cp-size=1 enable-prefill-context-parallel "
        "enable-nsa-prefill-context-parallel moe-data-parallel-size=1",
    ),
    (
        "quantized weights and quantized KV are not available yet",
        "quantization quantization-param-path kv-cache-dtype=auto torchao-config= modelopt-quant "
        "modelopt-checkpoint-restore-path modelopt-checkpoint-save-path modelopt-export-path quantize-and-serve "
        "rl-quant-profile speculative-draft-model-quantization=unquant fp8-gemm-backend=auto "
        "fp4-gemm-backend=auto",
    ),
    ("the output head always computes in the model's type", "enable-fp32-lm-head"),
    (
        "low-rank adapters are not available yet",
        "enable-lora enable-lora-overlap-loading lora-paths max-lora-rank lora-target-modules max-loaded-loras "
        "max-loras-per-batch lora-eviction-policy lora-backend max-lora-chunk-size",
    ),
    (
        "there is one set of metrics with fixed labels and buckets; --enable-metrics shows it",
        "enable-metrics-for-all-schedulers enable-mfu-metrics "
        "tokenizer-metrics-custom-labels-header tokenizer-metrics-allowed-custom-labels "
        "bucket-time-to-first-token bucket-inter-token-latency bucket-e2e-request-latency "
        "collect-tokens-histogram prompt-tokens-buckets generation-tokens-buckets "
        "export-metrics-to-file export-metrics-to-file-dir",
    ),
    (
        "tracing is not available; /metrics has the distribution of step times",
        "gc-warning-threshold-secs enable-request-time-stats-logging kv-events-config enable-trace "
        "otlp-traces-endpoint show-time-cost",
    ),
    (
        "log records have one target",
        "log-level-http log-requests-target uvicorn-access-log-exclude-prefixes crash-dump-folder",
    ),
    (
        "grammars are compiled by xgrammar, and never to disk",
        "disable-outlines-disk-cache=",
    ),
    ("tools are run by clients", "tool-server"),
    (
        "image, video and audio input is not available yet",
        "enable-multimodal mm-attention-backend mm-max-concurrent-calls mm-per-request-timeout mm-process-config "
        "limit-mm-data-per-request enable-broadcast-mm-inputs-process enable-prefix-mm-cache "
        "keep-mm-feature-on-device disable-fast-image-processor= mm-enable-dp-encoder enable-mm-global-cache "
        "encoder-only language-only encoder-urls encoder-transfer-backend",
    ),
    (
        "this engine generates text and has no embedding or scoring mode",
        "is-embedding multi-item-scoring-delimiter enable-return-routed-experts dllm-algorithm dllm-algorithm-config",
    ),
    (
        "prefill and decode run in one server",
        "disaggregation-mode=null disaggregation-transfer-backend disaggregation-bootstrap-port "
        "disaggregation-decode-tp disaggregation-decode-dp disaggregation-prefill-pp disaggregation-ib-device "
        "disaggregation-decode-enable-offload-kvcache num-reserved-decode-tokens "
        "disaggregation-decode-polling-interval enable-pdmux pdmux-config-path sm-group-num",
    ),
    (
        "the prefix cache lives in the memory of the device only",
        "enable-hierarchical-cache hicache-ratio hicache-size hicache-write-policy hicache-io-backend "
        "hicache-mem-layout hicache-storage-backend hicache-storage-prefetch-policy "
        "hicache-storage-backend-extra-config enable-lmcache enable-hisparse radix-eviction-policy=lru "
        "file-storage-path",
    ),
    (
        "the KV pool has one size for all layers",
        "swa-full-tokens-ratio hybrid-kvcache-ratio disable-hybrid-swa-memory=",
    ),
    (
        "weights stay on the device",
        "cpu-offload-gb=0 offload-group-size offload-num-in-group offload-prefetch-step offload-mode",
    ),
    (
        "memory is not handed back while the server runs",
        "enable-memory-saver enable-weights-cpu-backup enable-draft-weights-cpu-backup delete-ckpt-after-loading",
    ),
    (
        "weights are read from local safetensors files at start only",
        "download-dir model-loader-extra-config={} weight-loader-disable-mmap custom-weight-loader "
        "weight-version=default checkpoint-engine-wait-weights-before-ready remote-instance-weight-loader-backend "
        "remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-seed-instance-service-port "
        "remote-instance-weight-loader-send-weights-group-ports "
        "remote-instance-weight-loader-start-seed-via-transfer-engine model-checksum "
        "weight-loader-prefetch-checkpoints speculative-draft-load-format=auto",
    ),
    ("models are implemented here and nowhere else", "model-impl=auto|sglang"),
    (
        "one attention backend serves every phase; choose it with --attention-backend",
        "prefill-attention-backend decode-attention-backend speculative-attention-mode "
        "speculative-draft-attention-backend nsa-prefill-backend nsa-decode-backend "
        "flashinfer-mla-disable-ragged= triton-attention-reduce-in-fp32 triton-attention-num-kv-splits "
        "triton-attention-split-tile-size disable-chunked-prefix-cache= enable-flashmla",
    ),
    ("sampling has one implementation", "sampling-backend=pytorch"),
    (
        "mixture-of-experts layers have one implementation",
        "moe-runner-backend=auto flashinfer-mxfp4-moe-precision=default enable-flashinfer-allreduce-fusion "
        "enable-aiter-allreduce-fusion enable-triton-kernel-moe enable-flashinfer-cutlass-moe "
        "enable-flashinfer-trtllm-moe disable-shared-experts-fusion= speculative-moe-runner-backend=auto "
        "speculative-moe-a2a-backend=none disable-flashinfer-autotune= "
        "disable-flashinfer-cutlass-moe-fp4-allgather=",
    ),
    (
        "graphs are captured of whole steps, which is the default, and in one way",
        "enable-profile-cuda-graph enable-cudagraph-gc enable-piecewise-cuda-graph= piecewise-cuda-graph-compiler "
        "enable-breakable-cuda-graph",
    ),
    (
        "compiling the model is not available yet",
        "enable-torch-compile enable-torch-compile-debug-mode torch-compile-max-bs",
    ),
    (
        "a step is scheduled once the result of the one before the last is known",
        "num-continuous-decode-steps=1",
    ),
    (
        "chunks have one size, and prefills are not held back",
        "enable-dynamic-chunking prefill-max-requests enable-prefill-delayer "
        "prefill-delayer-max-delay-passes prefill-delayer-token-usage-low-watermark",
    ),
    (
        "requests have no priority",
        "enable-priority-scheduling abort-on-priority-when-disabled schedule-low-priority-values-first "
        "priority-scheduling-preemption-threshold default-priority-value",
    ),
    (
        "this speculative algorithm is not available",
        "speculative-token-map enable-multi-layer-eagle speculative-ngram-min-match-window-size "
        "speculative-ngram-max-match-window-size speculative-ngram-min-bfs-breadth "
        "speculative-ngram-max-bfs-breadth speculative-ngram-match-type speculative-ngram-branch-length "
        "speculative-ngram-capacity speculative-ngram-max-trie-depth",
    ),
    (
        "the model has no state-space layers",
        "max-mamba-cache-size mamba-ssm-dtype mamba-full-memory-ratio mamba-scheduler-strategy "
        "mamba-track-interval mamba-backend linear-attn-backend linear-attn-decode-backend "
        "linear-attn-prefill-backend",
    ),
    (
        "sparse attention is not available",
        "enable-double-sparsity ds-channel-config-path ds-heavy-channel-num ds-heavy-token-num "
        "ds-heavy-channel-type ds-sparse-decode-threshold",
    ),
    (
        "there is one device and nothing to reduce over",
        "base-gpu-id=0 gpu-id-step=1 numa-node enable-nccl-nvls enable-symm-mem "
        "enable-mscclpp enable-torch-symm-mem enable-p2p-check enable-attn-tp-input-scattered "
        "enable-quant-communications",
    ),
    (
        "this engine trains nothing; --enable-deterministic-inference makes its output reproducible",
        "rl-on-policy-target",
    ),
    (
        "debugging dumps and profiling marks are not available",
        "debug-tensor-dump-output-folder debug-tensor-dump-layers debug-tensor-dump-input-file "
        "debug-tensor-dump-inject debug-tensor-dump-prefill-only enable-layerwise-nvtx-marker forward-hooks "
        "custom-sigquit-handler",
    ),
    (
        "the server speaks plain HTTP",
        "ssl-keyfile ssl-certfile ssl-ca-certs ssl-keyfile-password enable-ssl-refresh grpc-mode smg-grpc-mode "
        "fastapi-root-path= enable-http2",
    ),
    (
        "one process tokenizes and detokenizes",
        "tokenizer-worker-num=1 enable-tokenizer-batch-encode disable-tokenizer-batch-decode= skip-tokenizer-init "
        "tokenizer-mode=auto enable-dynamic-batch-tokenizer dynamic-batch-tokenizer-batch-size "
        "dynamic-batch-tokenizer-batch-timeout",
    ),
    ("streams have one form", "stream-output incremental-streaming-output= stream-response-default-include-usage"),
    ("templates are given as a file with --chat-template", "hf-chat-template-name completion-template"),
    (
        "default sampling comes from the model or is OpenAI's; choose with --sampling-defaults",
        "preferred-sampling-params",
    ),
    ("an idle server already sleeps and polls nothing", "sleep-on-idle= scheduler-recv-interval=1"),
    ("start-up warms up with one request, or none with --skip-server-warmup", "warmups"),
    ("kernels are chosen by the device", "enable-fused-qk-norm-rope enable-precise-embedding-interpolation"),
)


def _table() -> dict[str, UnsupportedFlag]:
    table: dict[str, UnsupportedFlag] = {}
    for reason, flags in _REASONS:
        for item in flags.split():
            name, has_value, values = item.partition("=")
            flag = "--" + name
            assert flag not in table, flag
            table[flag] = UnsupportedFlag(flag, reason, tuple(values.split("|")) if has_value else ())
    return table


UNSUPPORTED_FLAGS: Mapping[str, UnsupportedFlag] = MappingProxyType(_table())
