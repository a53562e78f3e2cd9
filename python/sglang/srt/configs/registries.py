"""Everything that plugs in by name: tables name -> ``"module:Class"``, imported only when used.

A model, an attention backend or a speculative algorithm adds a file and one line here; the choices of the command line
follow from these tables.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# architecture in config.json -> model class
MODELS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma4ForCausalLM": "sglang.srt.models.gemma4_causal:Gemma4ForCausalLM",
        "Gemma4UnifiedForCausalLM": "sglang.srt.models.gemma4_causal:Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration": "sglang.srt.models.gemma4_mm:Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration": "sglang.srt.models.gemma4_mm:Gemma4ForConditionalGeneration",
        "Gemma4AssistantForCausalLM": "sglang.srt.models.gemma4_mtp:Gemma4AssistantForCausalLM",
        "Gemma4UnifiedAssistantForCausalLM": "sglang.srt.models.gemma4_mtp:Gemma4AssistantForCausalLM",
    }
)

# --attention-backend -> backend class
ATTENTION_BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "torch_native": "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend",
        "triton": "sglang.srt.layers.attention.triton_backend:TritonAttnBackend",
    }
)

# resolved --speculative-algorithm -> worker class
SPECULATIVE_ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {"FROZEN_KV_MTP": "sglang.srt.speculative.frozen_kv_mtp_worker:FrozenKVMTPWorker"}
)

# the same, for workers whose next step may be started before the last one's result is read
OVERLAPPED_ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {"FROZEN_KV_MTP": "sglang.srt.speculative.frozen_kv_mtp_worker_v2:FrozenKVMTPWorkerV2"}
)

# --grammar-backend -> backend class
GRAMMAR_BACKENDS: Mapping[str, str] = MappingProxyType(
    {"xgrammar": "sglang.srt.constrained.xgrammar_backend:XGrammarBackend"}
)

# --reasoning-parser and --tool-call-parser -> how a family of models marks thoughts and calls in its answers
OUTPUT_FORMATS: Mapping[str, str] = MappingProxyType({"gemma4": "sglang.srt.entrypoints.parsers.gemma4:Gemma4Format"})


def load_entry(table: Mapping[str, str], name: str) -> Any:
    """Import and return the class that ``name`` stands for in one of the tables above.

    ``ValueError`` lists the table's names when it has no such entry. An import error of the module passes through: it
    is a fault of the installation and says so itself.
    """
    if name not in table:
        close = difflib.get_close_matches(name, table, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(table)}"
        raise ValueError(f"{name!r} is not a known name: {hint}")
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
