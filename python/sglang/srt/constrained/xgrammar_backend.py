"""Grammars by xgrammar: JSON schemas, regular expressions, EBNF and structural tags."""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.constrained.base_grammar import GrammarKind
from sglang.srt.server_args_slices import GrammarConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_REASON_CHARS = 300
_POSITION = re.compile(r"^(?:\[[\d:]+\] \S+:\d+: )?(?:Check failed: \(.*?\) is false: )?", re.DOTALL)


class XGrammar:
    """A matcher of xgrammar. ``textless``: tokens that it never accepts, and would report each time."""

    def __init__(self, matcher: Any, textless: frozenset[int]) -> None:
        self._matcher = matcher
        self._textless = textless

    def accept(self, token_id: int) -> bool:
        return token_id not in self._textless and bool(self._matcher.accept_token(token_id))

    def fill_mask(self, masks: torch.Tensor, row: int) -> None:
        self._matcher.fill_next_token_bitmask(masks, row)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fork(self) -> XGrammar:
        return XGrammar(self._matcher.fork(), self._textless)


class XGrammarBackend:
    """Compiles for one tokenizer and the vocabulary of one model.

    Special tokens have no text in a grammar, so that markers cannot get into strings; a structural tag or an EBNF
    grammar that spells one out means the token. ``stop_ids`` may follow a complete answer, and end it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, stop_ids: Sequence[int], config: GrammarConfig
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = list(stop_ids)
        self._config = config
        self._specials = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._lock = threading.Lock()
        self._vocabulary: list[bytes] = []
        self._compilers: dict[frozenset[int], Any] = {}

    def compile(self, kind: GrammarKind, text: str) -> XGrammar:
        xgrammar = _xgrammar()
        compiler = self._compiler(self._spelled_specials(kind, text))
        try:
            compiled = self._compile(compiler, kind, text)
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            reason = _POSITION.sub("", str(error)).strip().rstrip(".") or type(error).__name__
            raise ValueError(f"{kind} cannot be used: {reason[:_MAX_REASON_CHARS]}") from error
        textless = frozenset(compiled.tokenizer_info.special_token_ids)
        return XGrammar(xgrammar.GrammarMatcher(compiled), textless)

    def _compile(self, compiler: Any, kind: GrammarKind, text: str) -> Any:
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "ebnf":
            return compiler.compile_grammar(text)
        value = json.loads(text)
        if kind == "structural_tag":
            return compiler.compile_structural_tag(json.dumps(self._structural_tag(value)))
        return compiler.compile_json_schema(
            json.dumps(value),
            any_whitespace=self._config.any_whitespace,
            max_whitespace_cnt=self._config.max_whitespace if self._config.any_whitespace else None,
        )

    def _structural_tag(self, value: Any) -> Any:
        """The form with ``format``, also for the older one of ``structures`` and ``triggers``."""
        if isinstance(value, dict) and "structures" in value:
            tags = [_tag(item) for item in value["structures"]]
            tag_format = {"type": "triggered_tags", "triggers": value.get("triggers", []), "tags": tags}
            value = {"type": "structural_tag", "format": tag_format}
        return self._bound_whitespace(value)

    def _bound_whitespace(self, value: Any) -> Any:
        """Every ``json_schema`` of a structural tag with a limit of white space, where it has none of its own."""
        if isinstance(value, list):
            return [self._bound_whitespace(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") != "json_schema":
            return {name: self._bound_whitespace(item) for name, item in value.items()}
        # xgrammar has no form without white space here: one character is the least
        limit = self._config.max_whitespace if self._config.any_whitespace else 1
        return value if limit is None else {"max_whitespace_cnt": limit, **value}

    def _spelled_specials(self, kind: GrammarKind, text: str) -> frozenset[int]:
        if kind not in ("ebnf", "structural_tag"):
            return frozenset()
        plain = text.replace('\\"', '"')
        return frozenset(i for i, token in self._specials.items() if token in plain and i not in self._stop_ids)

    def _compiler(self, visible: frozenset[int]) -> Any:
        """The compiler whose vocabulary shows these special tokens as text."""
        xgrammar = _xgrammar()
        with self._lock:
            if visible not in self._compilers:
                if not self._vocabulary:
                    info = xgrammar.TokenizerInfo.from_huggingface(
                        self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._stop_ids
                    )
                    self._vocabulary = info.decoded_vocab
                hidden = self._specials.keys() - visible
                vocabulary = [b"" if i in hidden else piece for i, piece in enumerate(self._vocabulary)]
                info = xgrammar.TokenizerInfo(vocabulary, vocab_size=self._vocab_size, stop_token_ids=self._stop_ids)
                # compiled grammars are kept by whoever asks for them
                self._compilers[visible] = xgrammar.GrammarCompiler(info, cache_enabled=False)
            return self._compilers[visible]


def _tag(item: Any) -> dict[str, Any]:
    """One entry of ``structures`` as one of ``tags``."""
    if not isinstance(item, dict) or "begin" not in item or "end" not in item:
        raise ValueError(f"structures must be objects with begin, schema and end, got {item!r:.100}")
    content = {"type": "json_schema", "json_schema": item.get("schema", True)}
    return {"begin": item["begin"], "content": content, "end": item["end"]}


def _xgrammar() -> Any:
    """The package, imported only when a grammar is compiled."""
    return importlib.import_module("xgrammar")
