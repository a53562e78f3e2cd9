"""Server arguments: parsing, checks, resolution, refusals, slices, and that docs and code say the same."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.configs import registries
from sglang.srt.configs.model_config_parser import ASSISTANT_ARCHITECTURES
from sglang.srt.server_args import (
    ARG_SPECS,
    GraphConfig,
    PortArgs,
    ServerArgs,
    _resolve_speculative_algorithm_alias,
    prepare_server_args,
)
from sglang.srt.server_args_docs import render
from sglang.srt.server_args_resolution import resolve_server_args
from sglang.srt.server_args_speculative import complete_shape
from sglang.srt.server_args_unsupported import UNSUPPORTED_FLAGS
from sglang.srt.utils.embedded import EmbeddedModel

TINY = "tiny-gemma4"
SPEC = ("--speculative-algorithm", "FROZEN_KV_MTP")
DOCS = Path(__file__).parents[2] / "docs" / "server_arguments.md"


def parse(*argv: str, model: str = TINY) -> ServerArgs:
    return prepare_server_args(["--model-path", model, *argv])


def resolve(*argv: str, model: str = TINY) -> ServerArgs:
    return resolve_server_args(parse("--device", "cpu", *argv, model=model))


@pytest.fixture
def foreign_draft(tmp_path: Path) -> str:
    """A draft model of another family."""
    folder = tmp_path / "eagle"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    return str(folder)


# One case per argument: text on the command line, and what it is once resolved (with the rest left alone).
RESOLUTION: dict[str, tuple[list[str], Any]] = {
    "load_format": (["--load-format", "dummy"], "dummy"),
    "json_model_override_args": (["--json-model-override-args", '{"sliding_window": 8}'], '{"sliding_window": 8}'),
    "dtype": (["--dtype", "half"], "float16"),
    "context_length": (["--context-length", "512"], 512),
    "revision": (["--revision", "main"], "main"),
    "trust_remote_code": (["--trust-remote-code"], True),
    "host": (["--host", "127.0.0.2"], "127.0.0.2"),
    "port": (["--port", "31000"], 31000),
    "skip_server_warmup": (["--skip-server-warmup"], True),
    "shutdown_timeout": (["--shutdown-timeout", "30"], 30.0),
    "allowed_origins": (["--allowed-origins", "https://chat.example.org"], "https://chat.example.org"),
    "update_weights_dir": (["--update-weights-dir", str(Path(__file__).parent)], str(Path(__file__).resolve().parent)),
    "mem_fraction_static": (["--mem-fraction-static", "0.5"], 0.5),
    "max_total_tokens": (["--max-total-tokens", "1000"], 1000),
    "max_running_requests": (["--max-running-requests", "3"], 3),
    "max_queued_requests": (["--max-queued-requests", "7"], 7),
    "chunked_prefill_size": (["--chunked-prefill-size", "-1"], -1),
    "enable_mixed_chunk": (["--enable-mixed-chunk"], True),
    "max_prefill_tokens": (["--max-prefill-tokens", "99"], 99),
    "schedule_policy": (["--schedule-policy", "lpm"], "lpm"),
    "schedule_conservativeness": (["--schedule-conservativeness", "2"], 2.0),
    "page_size": (["--page-size", "16"], 16),
    "disable_radix_cache": (["--disable-radix-cache"], True),
    "tp_size": (["--tp", "2"], 2),
    "dp_size": (["--dp", "3"], 3),
    "load_balance_method": (["--load-balance-method", "total_tokens"], "auto"),
    "nnodes": (["--nnodes", "2", "--tp-size", "4", "--dist-init-addr", "10.0.0.1:5000"], 2),
    "node_rank": (["--node-rank", "1", "--nnodes", "2", "--tp-size", "2", "--dist-init-addr", "a:1"], 1),
    "dist_init_addr": (["--dist-init-addr", "[::1]:5000"], "[::1]:5000"),
    "dist_timeout": (["--dist-timeout", "30"], 30),
    "disable_custom_all_reduce": (["--disable-custom-all-reduce"], True),
    "device": (["--device", "cpu"], "cpu"),
    "attention_backend": (["--attention-backend", "torch_native"], "torch_native"),
    "disable_cuda_graph": (["--disable-cuda-graph"], True),
    "cuda_graph_max_bs": (["--cuda-graph-max-bs", "24"], 24),
    "cuda_graph_bs": (["--cuda-graph-bs", "1", "2", "12"], (1, 2, 12)),
    "disable_cuda_graph_padding": (["--disable-cuda-graph-padding"], True),
    "disable_piecewise_cuda_graph": (["--disable-piecewise-cuda-graph"], True),
    "piecewise_cuda_graph_max_tokens": (["--piecewise-cuda-graph-max-tokens", "768"], 768),
    "piecewise_cuda_graph_tokens": (["--piecewise-cuda-graph-tokens", "64", "300"], (64, 300)),
    "disable_overlap_schedule": (["--disable-overlap-schedule"], True),
    "enable_deterministic_inference": (["--enable-deterministic-inference"], True),
    "watchdog_timeout": (["--watchdog-timeout", "9"], 9.0),
    "soft_watchdog_timeout": (["--soft-watchdog-timeout", "1.5"], 1.5),
    "random_seed": (["--random-seed", "5"], 5),
    "stream_interval": (["--stream-interval", "4"], 4),
    "log_level": (["--log-level", "debug"], "debug"),
    "enable_metrics": (["--enable-metrics"], True),
    "log_requests": (["--log-requests"], True),
    "log_requests_level": (["--log-requests-level", "3"], 3),
    "log_requests_format": (["--log-requests-format", "json"], "json"),
    "decode_log_interval": (["--decode-log-interval", "9"], 9),
    "api_key": (["--api-key", "sesame"], "sesame"),
    "admin_api_key": (["--admin-api-key", "mellon"], "mellon"),
    "served_model_name": (["--served-model-name", "mine"], "mine"),
    "chat_template": (["--chat-template", str(Path(__file__).resolve())], str(Path(__file__).resolve())),
    "allow_auto_truncate": (["--allow-auto-truncate"], True),
    "enable_cache_report": (["--enable-cache-report"], True),
    "enable_custom_logit_processor": (["--enable-custom-logit-processor"], True),
    "enable_return_hidden_states": (["--enable-return-hidden-states"], True),
    "sampling_defaults": (["--sampling-defaults", "openai"], "openai"),
    "reasoning_parser": (["--reasoning-parser", "none"], "none"),
    "tool_call_parser": (["--tool-call-parser", "none"], "none"),
    "grammar_backend": (["--grammar-backend", "none"], "none"),
    "constrained_json_whitespace_pattern": (["--constrained-json-whitespace-pattern", "[ \\n\\t]?"], "[ \\n\\t]?"),
    "constrained_json_disable_any_whitespace": (["--constrained-json-disable-any-whitespace"], True),
    "speculative_algorithm": (["--speculative-algorithm", "NEXTN"], "FROZEN_KV_MTP"),
    "speculative_draft_model_revision": ([*SPEC, "--speculative-draft-model-revision", "r"], "r"),
    "speculative_adaptive": ([*SPEC, "--speculative-adaptive"], True),
    "speculative_num_steps": ([*SPEC, "--speculative-num-steps", "7"], 7),
    "speculative_eagle_topk": ([*SPEC, "--speculative-eagle-topk", "2"], 2),
    "speculative_use_rejection_sampling": ([*SPEC, "--speculative-use-rejection-sampling"], True),
    "speculative_num_draft_tokens": ([*SPEC, "--speculative-num-draft-tokens", "3"], 3),
    "speculative_accept_threshold_single": (["--speculative-accept-threshold-single", "1"], 1.0),
    "speculative_accept_threshold_acc": (["--speculative-accept-threshold-acc", "1.0"], 1.0),
}
# arguments whose value depends on where the test runs: each has a test of its own below
PATHS = {"model_path", "tokenizer_path", "speculative_draft_model_path"}


def test_every_argument_has_a_case_help_and_docs() -> None:
    assert set(RESOLUTION) | PATHS == set(ARG_SPECS)
    page = DOCS.read_text()
    for spec in ARG_SPECS.values():
        assert len(spec.help) > 10 and spec.help.endswith(".")
        assert f"| `{spec.flag}`" in page


def test_the_docs_page_is_fresh() -> None:
    assert DOCS.read_text() == render(), "run: python -m sglang.srt.server_args_docs > docs/server_arguments.md"


@pytest.mark.parametrize("name", RESOLUTION)
def test_every_argument_is_parsed_and_resolved(name: str) -> None:
    argv, expected = RESOLUTION[name]
    args = resolve(*argv)
    assert getattr(args, name) == expected and type(getattr(args, name)) is type(expected)
    assert resolve_server_args(args) == args, "resolution is idempotent"


def test_paths_become_local_directories(trained_pair: EmbeddedModel, tiny_checkpoints: Path) -> None:
    args = resolve()
    assert args.model_path == args.tokenizer_path == str(trained_pair.target.resolve())
    assert args.served_model_name == TINY
    args = resolve("--tokenizer-path", TINY, model=str(tiny_checkpoints / "dense"))
    assert args.model_path == str((tiny_checkpoints / "dense").resolve())
    assert args.tokenizer_path == str(trained_pair.target.resolve())
    assert args.served_model_name == str(tiny_checkpoints / "dense")


def test_aliases_of_flags() -> None:
    assert prepare_server_args(["--model", "x"]).model_path == "x"
    assert parse("--speculative-draft-model", "y").speculative_draft_model_path == "y"
    assert parse("--port=31000").port == 31000
    assert parse("--dtype", "float").dtype == "float32"


def test_defaults_on_a_cpu() -> None:
    args = resolve()
    assert (args.dtype, args.device, args.attention_backend) == ("float32", "cpu", "torch_native")
    assert (args.context_length, args.chunked_prefill_size, args.page_size) == (8192, 2048, 1)
    assert args.random_seed is not None and args.mem_fraction_static is not None
    assert (args.host, args.port) == ("127.0.0.1", 30000)
    assert args.spec_config() is None


def test_defaults_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = resolve_server_args(parse())
    assert (args.device, args.dtype, args.chunked_prefill_size) == ("cuda", "bfloat16", 8192)


def test_cuda_must_be_there_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_server_args(parse()).device == "cpu"
    with pytest.raises(ValueError, match="--device"):
        resolve_server_args(parse("--device", "cuda"))


def test_seeds_are_drawn_once() -> None:
    assert len({resolve().random_seed for _ in range(4)}) > 1
    args = resolve()
    assert resolve_server_args(args).random_seed == args.random_seed


def test_arguments_are_a_value() -> None:
    args = resolve(*SPEC, "--api-key", "sesame")
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.port = 1  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(args)) == args
    assert args.derive(port=7).port == 7 and args.port == 30000
    with pytest.raises(ValueError, match="--port"):
        args.derive(port=0)
    before = dataclasses.replace(args)
    resolve_server_args(args)
    assert args == before
    assert "sesame" not in repr(args) and "api_key" not in args.public_dict()
    json.dumps(args.public_dict())


BAD_VALUES = [
    ("--port", "0"),
    ("--port", "65536"),
    ("--port", "abc"),
    ("--port", "1.5"),
    ("--port", "1" * 5000),
    ("--host", ""),
    ("--mem-fraction-static", "0"),
    ("--mem-fraction-static", "1.01"),
    ("--mem-fraction-static", "nan"),
    ("--mem-fraction-static", "inf"),
    ("--mem-fraction-static", "-0.5"),
    ("--mem-fraction-static", "half"),
    ("--max-total-tokens", "0"),
    ("--max-total-tokens", "-5"),
    ("--max-total-tokens", "99999999999"),
    ("--max-running-requests", "0"),
    ("--max-queued-requests", "0"),
    ("--chunked-prefill-size", "0"),
    ("--chunked-prefill-size", "-2"),
    ("--max-prefill-tokens", "0"),
    ("--schedule-policy", "fifo"),
    ("--schedule-conservativeness", "0"),
    ("--schedule-conservativeness", "nan"),
    ("--page-size", "0"),
    ("--page-size", "99999"),
    ("--device", "tpu"),
    ("--attention-backend", "magic"),
    ("--random-seed", "-1"),
    ("--stream-interval", "0"),
    ("--log-level", "loud"),
    ("--decode-log-interval", "0"),
    ("--context-length", "1"),
    ("--context-length", "8193"),
    ("--dtype", "int8"),
    ("--load-format", "gguf"),
    ("--json-model-override-args", "{"),
    ("--json-model-override-args", "[1]"),
    ("--json-model-override-args", "[" * 100_000),
    ("--json-model-override-args", '{"hidden_size": -3}'),
    ("--json-model-override-args", '{"no_such_key": 1}'),
    ("--api-key", ""),
    ("--served-model-name", " "),
    ("--shutdown-timeout", "-1"),
    ("--watchdog-timeout", "0"),
    ("--soft-watchdog-timeout", "inf"),
    ("--log-requests-level", "4"),
    ("--log-requests-format", "xml"),
    ("--allowed-origins", "chat.example.org"),
    ("--allowed-origins", "https://a.org,https://b.org/path"),
    ("--update-weights-dir", "/no/such/directory"),
    ("--chat-template", "/no/such/file"),
    ("--tokenizer-path", "/no/such/directory"),
    ("--sampling-defaults", "greedy"),
    ("--speculative-algorithm", "NGRAM"),
    ("--speculative-num-steps", "0"),
    ("--speculative-num-steps", "100000"),
    ("--speculative-eagle-topk", "0"),
    ("--speculative-num-draft-tokens", "1"),
    ("--speculative-accept-threshold-single", "0.9"),
    ("--speculative-accept-threshold-acc", "0.5"),
    ("--speculative-accept-threshold-acc", "2"),
]


@pytest.mark.parametrize(("flag", "value"), BAD_VALUES, ids=[f"{f[2:]}={v[:12]}" for f, v in BAD_VALUES])
def test_a_bad_value_is_one_sentence_that_names_the_flag(flag: str, value: str) -> None:
    with pytest.raises(ValueError, match=flag) as info:
        resolve(flag, value)
    assert "\n" not in str(info.value) and len(str(info.value)) < 600


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", True),
        ("port", "30000"),
        ("port", None),
        ("mem_fraction_static", float("nan")),
        ("mem_fraction_static", "0.5"),
        ("disable_radix_cache", 1),
        ("host", None),
        ("model_path", 3),
        ("schedule_conservativeness", 10**400),
    ],
)
def test_keywords_are_checked_like_flags(name: str, value: Any) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=flag):
        ServerArgs(**{"model_path": TINY, name: value})


def test_whole_numbers_are_numbers() -> None:
    assert ServerArgs(model_path=TINY, mem_fraction_static=1) == ServerArgs(model_path=TINY, mem_fraction_static=1.0)


def test_values_that_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="--chunked-prefill-size 100 .*--page-size 16"):
        resolve("--chunked-prefill-size", "100", "--page-size", "16")
    with pytest.raises(ValueError, match="--max-total-tokens 8 .*--page-size 16"):
        resolve("--max-total-tokens", "8", "--page-size", "16")
    chunk = resolve("--page-size", "48").chunked_prefill_size
    assert chunk is not None and chunk % 48 == 0 and chunk >= 2048


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port"], "--port"),
        (["--prot", "3"], "unknown flag '--prot': did you mean --port"),
        (["--prot=3"], "'--prot'"),
        (["--por", "3"], "unknown flag '--por'"),
        (["--zzzzzz"], "see --help"),
        (["stray"], "unexpected argument 'stray'"),
        (["--trust-remote-code", "true"], "unexpected argument 'true'"),
    ],
)
def test_a_bad_command_line_is_one_sentence(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*argv)


def test_the_model_path_is_needed() -> None:
    with pytest.raises(ValueError, match="--model-path is missing.*tiny-gemma4"):
        prepare_server_args([])
    with pytest.raises(ValueError, match="--model-path is missing"):
        ServerArgs.from_kwargs({})


@pytest.mark.parametrize("flag", UNSUPPORTED_FLAGS)
def test_an_unsupported_flag_is_refused_unless_it_changes_nothing(flag: str) -> None:
    refused = UNSUPPORTED_FLAGS[flag]
    with pytest.raises(ValueError, match=f"^{flag} is not supported: "):
        refused.check("something else")
    for value in refused.accepted:
        refused.check(value)


def test_unsupported_flags_on_the_command_line() -> None:
    neutral = [
        "--pp-size",
        "1",
        "--enable-piecewise-cuda-graph",
        "--dp=1",
    ]
    assert parse(*neutral, "--port", "31000") == parse("--port", "31000")
    for argv, reason in [
        (["--pp-size", "2"], "--pp-size is not supported: pipeline parallelism"),
        (["--quantization", "fp8"], "--quantization is not supported"),
        (["--enable-lora"], "--enable-lora is not supported"),
        (["--lora-paths", "a=b", "c=d"], "--lora-paths"),
        (["--enable-trace"], "--enable-trace is not supported: tracing"),
        (["--tool-server=demo"], "--tool-server"),
        (["--enable-breakable-cuda-graph"], "--enable-breakable-cuda-graph is not supported: graphs are captured of"),
    ]:
        with pytest.raises(ValueError, match=reason):
            parse(*argv)


def test_no_flag_is_both_supported_and_refused() -> None:
    supported = {name for spec in ARG_SPECS.values() for name in spec.names}
    assert not supported & set(UNSUPPORTED_FLAGS)
    assert len(UNSUPPORTED_FLAGS) > 150


def test_keywords_of_the_engine() -> None:
    args = ServerArgs.from_kwargs({"model_path": TINY, "pp_size": 1, "lora_paths": None})
    assert args == ServerArgs(model_path=TINY)
    with pytest.raises(ValueError, match="--pp-size is not supported"):
        ServerArgs.from_kwargs({"model_path": TINY, "pp_size": 2})
    with pytest.raises(ValueError, match="'pagesize': did you mean page_size"):
        ServerArgs.from_kwargs({"model_path": TINY, "pagesize": 2})


def test_slices_hold_what_was_asked_for(trained_pair: EmbeddedModel) -> None:
    args = resolve(
        *SPEC,
        "--max-total-tokens",
        "4096",
        "--chunked-prefill-size",
        "-1",
        "--json-model-override-args",
        '{"sliding_window": 32}',
        "--speculative-draft-model-revision",
        "r1",
        "--revision",
        "r0",
    )
    assert args.memory_config().max_total_tokens == 4096 and args.memory_config().context_length == 8192
    assert args.schedule_config().chunked_prefill_size is None
    assert resolve("--chunked-prefill-size", "64").schedule_config().chunked_prefill_size == 64
    load, draft = args.load_config(), args.draft_load_config()
    assert (load.model_path, load.overrides, load.revision) == (
        trained_pair.target.resolve(),
        {"sliding_window": 32},
        "r0",
    )
    assert (draft.model_path, draft.overrides, draft.revision) == (trained_pair.assistant.resolve(), {}, "r1")
    assert load.dtype == draft.dtype == "float32"
    spec = args.spec_config()
    assert spec is not None
    assert (spec.algorithm, spec.num_steps, spec.topk, spec.num_draft_tokens) == ("FROZEN_KV_MTP", 7, 1, 8)
    assert spec.draft_model_path == trained_pair.assistant.resolve()


def test_graph_sizes_follow_from_one_another() -> None:
    assert resolve().cuda_graph_max_bs == 256 and resolve().cuda_graph_bs is None
    assert resolve().disable_cuda_graph, "nothing is captured on a CPU"
    args = resolve("--cuda-graph-bs", "8", "2", "--disable-cuda-graph-padding")
    assert args.cuda_graph_max_bs == 8
    expected = GraphConfig(False, (8, 2), max_size=8, pad=False, overlap=True, prefill_max_size=2048)
    assert args.graph_config() == expected
    assert ServerArgs.from_kwargs({"model_path": TINY, "cuda_graph_bs": [1, 4]}).cuda_graph_bs == (1, 4)
    with pytest.raises(ValueError, match="--cuda-graph-bs has 9, which is above --cuda-graph-max-bs 8"):
        resolve("--cuda-graph-bs", "9", "1", "--cuda-graph-max-bs", "8")
    assert resolve("--chunked-prefill-size", "512").piecewise_cuda_graph_max_tokens == 512
    config = resolve("--piecewise-cuda-graph-tokens", "96", "32").graph_config()
    assert (config.prefill_sizes, config.prefill_max_size) == ((96, 32), 96)
    config = resolve("--piecewise-cuda-graph-tokens", "96", "--disable-piecewise-cuda-graph").graph_config()
    assert (config.prefill_sizes, config.prefill_max_size) == ((), 0)
    with pytest.raises(ValueError, match="-graph-tokens has 96, which is above --piecewise-cuda-graph-max-tokens 64"):
        resolve("--piecewise-cuda-graph-tokens", "96", "--piecewise-cuda-graph-max-tokens", "64")
    for bad in (["x"], ["1", "2.5"], ["0"], ["-3", "1"]):
        with pytest.raises(ValueError, match="^--cuda-graph-bs must be a list of integers at least 1"):
            parse("--cuda-graph-bs", *bad)
    with pytest.raises(ValueError, match="cuda-graph-bs"):
        parse("--cuda-graph-bs")
    for value in (3, [], [True], "8", [1.0]):
        with pytest.raises(ValueError, match="^--cuda-graph-bs must be"):
            ServerArgs(model_path=TINY, cuda_graph_bs=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["FROZEN_KV_MTP", "NEXTN", "EAGLE"])
@pytest.mark.parametrize("kind", ["dense", "unified"])
def test_an_assistant_means_frozen_kv_mtp(algorithm: str, kind: str, tiny_checkpoints: Path) -> None:
    draft = str(tiny_checkpoints / f"{kind}-assistant")
    assert _resolve_speculative_algorithm_alias(algorithm, draft, False) == "FROZEN_KV_MTP"
    target = str(tiny_checkpoints / kind)
    args = resolve("--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft, model=target)
    assert args.speculative_algorithm == "FROZEN_KV_MTP"
    assert resolve_server_args(args) == args
    assert args.speculative_algorithm in registries.SPECULATIVE_ALGORITHMS


def test_aliases_that_cannot_be(foreign_draft: str, trained_pair: EmbeddedModel) -> None:
    assert _resolve_speculative_algorithm_alias(None, None, False) is None
    assert _resolve_speculative_algorithm_alias(None, foreign_draft, False) is None
    with pytest.raises(ValueError, match="EAGLE3 .*is a Gemma 4 assistant, use FROZEN_KV_MTP"):
        _resolve_speculative_algorithm_alias("EAGLE3", str(trained_pair.assistant), False)
    for algorithm in ("FROZEN_KV_MTP", "NEXTN", "EAGLE", "EAGLE3"):
        with pytest.raises(ValueError, match=f"{algorithm} .*LlamaForCausalLMEagle3.*FROZEN_KV_MTP"):
            _resolve_speculative_algorithm_alias(algorithm, foreign_draft, False)
        with pytest.raises(ValueError, match="needs --speculative-draft-model-path"):
            _resolve_speculative_algorithm_alias(algorithm, None, False)
        with pytest.raises(ValueError, match="Gemma4ForCausalLM"):
            _resolve_speculative_algorithm_alias(algorithm, str(trained_pair.target), False)


def test_a_draft_with_its_own_code_needs_the_flag(trained_pair: EmbeddedModel, tmp_path: Path) -> None:
    raw = json.loads((trained_pair.assistant / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(ValueError, match="--trust-remote-code"):
        _resolve_speculative_algorithm_alias("NEXTN", str(tmp_path), False)
    assert _resolve_speculative_algorithm_alias("NEXTN", str(tmp_path), True) == "FROZEN_KV_MTP"


def test_the_embedded_model_brings_its_assistant(trained_pair: EmbeddedModel) -> None:
    for model in (TINY, str(trained_pair.target)):
        args = resolve(*SPEC, model=model)
        assert args.speculative_draft_model_path == str(trained_pair.assistant.resolve())
    # also when speculation is asked for after the first resolution
    later = resolve_server_args(resolve().derive(speculative_algorithm="EAGLE"))
    assert later.speculative_draft_model_path == str(trained_pair.assistant.resolve())


def test_other_models_need_a_draft_path(tiny_checkpoints: Path) -> None:
    with pytest.raises(ValueError, match="needs --speculative-draft-model-path"):
        resolve(*SPEC, model=str(tiny_checkpoints / "dense"))
    with pytest.raises(ValueError, match="--speculative-draft-model-path .* is not a directory"):
        resolve(*SPEC, "--speculative-draft-model-path", "/nowhere", model=str(tiny_checkpoints / "dense"))


def test_a_damaged_assistant_is_named(trained_pair: EmbeddedModel, tmp_path: Path) -> None:
    shutil.copy(trained_pair.assistant / "config.json", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["backbone_hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="--speculative-draft-model-path .*backbone_hidden_size"):
        resolve(*SPEC, "--speculative-draft-model-path", str(tmp_path))


@pytest.mark.parametrize("kind", ["dense", "eseries", "unified"])
def test_an_assistant_is_no_target(kind: str, tiny_checkpoints: Path) -> None:
    with pytest.raises(ValueError, match="--model-path .* is an assistant .*--speculative-draft-model-path"):
        resolve(model=str(tiny_checkpoints / f"{kind}-assistant"))


@pytest.mark.parametrize(
    "argv",
    [
        ["--speculative-draft-model-path", "x"],
        ["--speculative-draft-model-revision", "x"],
        ["--speculative-num-steps", "3"],
        ["--speculative-eagle-topk", "1"],
        ["--speculative-num-draft-tokens", "4"],
    ],
)
def test_speculative_settings_need_an_algorithm(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{argv[0]} .*without --speculative-algorithm"):
        resolve(*argv)


SHAPES = [
    ("E2B", 1536, 35, False, 2),
    ("E4B", 2560, 42, False, 3),
    ("12B", 3840, 48, False, 4),
    ("26B-A4B", 2816, 30, True, 3),
    ("31B", 5376, 60, False, 5),
    ("unknown", 1024, 12, False, 3),
]


@pytest.mark.parametrize(("name", "hidden", "layers", "moe", "steps"), SHAPES, ids=[s[0] for s in SHAPES])
def test_default_depth_follows_the_target(
    name: str,
    hidden: int,
    layers: int,
    moe: bool,
    steps: int,
    tiny_checkpoints: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = {"hidden_size": hidden, "num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    argv = [*SPEC, "--speculative-draft-model-path", str(tiny_checkpoints / "dense-assistant")]
    with caplog.at_level(logging.INFO):
        args = resolve(
            *argv,
            "--json-model-override-args",
            json.dumps(changes),
            model=str(tiny_checkpoints / ("moe" if moe else "dense")),
        )
    assert args.speculative_adaptive
    assert args.speculative_num_steps == steps + 3 and args.speculative_num_draft_tokens == steps + 4
    assert f"--speculative-num-steps is {steps + 3}" in caplog.text and f"({steps}) and 3 more" in caplog.text
    fixed = args.derive(speculative_num_steps=None, speculative_num_draft_tokens=None, speculative_adaptive=False)
    assert resolve_server_args(fixed).speculative_num_steps == steps
    assert (name if name != "unknown" else "no known size") in caplog.text


@pytest.mark.parametrize(
    ("argv", "adaptive", "steps"),
    [
        ([], True, 7),
        (["--speculative-eagle-topk", "1"], True, 7),
        (["--context-length", "7"], True, 5),
        (["--context-length", "6"], True, 4),
        (["--speculative-num-steps", "4"], False, 4),
        (["--speculative-num-draft-tokens", "5"], False, 4),
        (["--speculative-num-steps", "2", "--speculative-adaptive"], True, 2),
        (["--speculative-eagle-topk", "2"], False, 4),
        (["--speculative-use-rejection-sampling"], False, 4),
        (["--speculative-use-rejection-sampling", "--speculative-adaptive"], True, 7),
        (["--tp-size", "2"], False, 4),
    ],
)
def test_the_length_adapts_unless_something_speaks_against_it(argv: list[str], adaptive: bool, steps: int) -> None:
    spec = resolve(*SPEC, *argv).spec_config()
    assert spec is not None and (spec.adaptive, spec.num_steps) == (adaptive, steps)


def test_without_speculation_no_length_adapts() -> None:
    assert resolve().speculative_adaptive is None and resolve().spec_config() is None


def test_depths_follow_from_one_another() -> None:
    assert complete_shape(None, None, None, 4) == (4, 1, 5)
    assert complete_shape(2, None, None, 4) == (2, 1, 3)
    assert complete_shape(None, None, 2, 4) == (1, 1, 2)
    assert complete_shape(3, 1, 4, 9) == (3, 1, 4)
    names = "--speculative-num-steps 3, --speculative-eagle-topk 1 and --speculative-num-draft-tokens 8"
    with pytest.raises(ValueError, match=names):
        complete_shape(3, None, 8, 4)
    assert complete_shape(3, 2, None, 4) == (3, 2, 7)
    assert complete_shape(None, 2, 4, 4) == (4, 2, 4)
    assert complete_shape(6, 3, None, 4) == (6, 3, 16), "no more than attention takes at once"
    assert complete_shape(2, 2, 7, 4) == (2, 2, 7)
    with pytest.raises(ValueError, match="--speculative-eagle-topk 2 .*from 2 to 7 draft tokens"):
        complete_shape(2, 2, 8, 4)


def test_trees_have_their_limits() -> None:
    def refused(match: str, *argv: str) -> None:
        with pytest.raises(ValueError, match=match):
            resolve(*SPEC, "--speculative-eagle-topk", "2", *argv)

    refused("--speculative-use-rejection-sampling draws chains", "--speculative-use-rejection-sampling")
    steps = ("--speculative-num-steps", "600")
    refused("--speculative-num-steps 600 .*attention window of", *steps, "--speculative-num-draft-tokens", "9")
    assert resolve(*SPEC, "--speculative-eagle-topk", "2").speculative_num_draft_tokens == 9


def test_a_chain_must_fit_the_context() -> None:
    with pytest.raises(ValueError, match="--speculative-num-steps 40 does not fit the context of 16"):
        resolve(*SPEC, "--speculative-num-steps", "40", "--context-length", "16")


def test_port_args_are_private_and_removable() -> None:
    first, second = PortArgs.init_new(), PortArgs.init_new()
    try:
        assert first.folder != second.folder
        assert stat.S_IMODE(first.folder.stat().st_mode) == 0o700
        addresses = {first.scheduler_input_ipc, first.tokenizer_ipc}
        assert len(addresses) == 2 and all(a.startswith(f"ipc://{first.folder}/") for a in addresses)
    finally:
        first.remove()
        second.remove()
    assert not first.folder.exists()


def test_a_long_temporary_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with pytest.raises(ValueError, match="TMPDIR"):
        PortArgs.init_new()
    assert not list(folder.iterdir())


def test_registries_are_sealed_and_name_their_entries() -> None:
    for table in (registries.MODELS, registries.ATTENTION_BACKENDS, registries.SPECULATIVE_ALGORITHMS):
        with pytest.raises(TypeError):
            table["new"] = "x:Y"  # type: ignore[index]
    assert set(ASSISTANT_ARCHITECTURES) < set(registries.MODELS)
    assert registries.load_entry({"od": "collections:OrderedDict"}, "od").__name__ == "OrderedDict"
    with pytest.raises(ValueError, match="'torch_natve' is not a known name: did you mean torch_native"):
        registries.load_entry(registries.ATTENTION_BACKENDS, "torch_natve")
    with pytest.raises(ValueError, match="use one of FROZEN_KV_MTP"):
        registries.load_entry(registries.SPECULATIVE_ALGORITHMS, "x")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model-path", "/no/such/directory"], "error: --model-path"),
        (["--model-path", TINY, "--pp-size", "2"], "error: --pp-size is not supported"),
    ],
)
def test_the_launcher_ends_with_one_sentence(argv: list[str], message: str) -> None:
    command = [sys.executable, "-m", "sglang.launch_server", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_help_lists_every_flag() -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for spec in ARG_SPECS.values():
        assert all(name in done.stdout for name in spec.names)
    assert "--pp-size" not in done.stdout
