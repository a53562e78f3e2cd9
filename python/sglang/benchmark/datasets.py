"""Prompts for `bench_serving`: random ones, ones that share prefixes, and ones from files."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerFast

# shorter prompts and answers of a conversation measure nothing
_MIN_TOKENS = 4
# decoding random ids and encoding the text need not give the ids back; a few rounds come close to the length asked for
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: its text, or token ids, its length in tokens, and how many tokens to ask for."""

    prompt: str | tuple[int, ...]
    prompt_len: int
    output_len: int


class PromptMaker:
    """Makes prompts by a tokenizer and the options of the command line; the same seed makes the same prompts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
        self._tokenizer = tokenizer
        self._args = args
        self._rng = random.Random(args.seed)
        special = set(tokenizer.all_special_ids)
        # of the base vocabulary, so that added tokens, which often have a meaning, stay out
        self._ordinary = [i for i in range(tokenizer.vocab_size) if i not in special]

    def make(self) -> list[Prompt]:
        """As many prompts as ``--num-prompts`` says, or as there are. ``ValueError`` when there are none."""
        prompts = list(_DATASETS[self._args.dataset_name](self))[: self._args.num_prompts]
        if not prompts:
            raise ValueError(
                f"--dataset-path {self._args.dataset_path} has no prompt that can be used: prompt and answer need "
                f"{_MIN_TOKENS} tokens each, and both must fit into --sharegpt-context-len if that is given"
            )
        return prompts

    def random(self) -> Iterator[Prompt]:
        args = self._args
        for _ in range(args.num_prompts):
            length = self._length(args.random_input_len)
            yield self._finish(self._ids(length), self._length(args.random_output_len))

    def shared_prefix(self) -> Iterator[Prompt]:
        """Groups of questions behind one system prompt each; ``--num-prompts`` does not count here."""
        args = self._args
        prompts = []
        for _ in range(args.gsp_num_groups):
            system = self._ids(args.gsp_system_prompt_len)
            for _ in range(args.gsp_prompts_per_group):
                ids = system + self._ids(args.gsp_question_len)
                prompts.append(self._finish(ids, args.gsp_output_len))
        self._rng.shuffle(prompts)
        args.num_prompts = len(prompts)
        yield from prompts

    def sharegpt(self) -> Iterator[Prompt]:
        """First question and answer of each conversation of a JSON file in ShareGPT's form, in random order."""
        conversations = _read_json(self._path())
        if not isinstance(conversations, list):
            raise ValueError(f"--dataset-path {self._path()} must hold a list of conversations")
        turns = [_turns(item) for item in conversations]
        yield from self._conversations([pair for pair in turns if len(pair) >= 2])

    def custom(self) -> Iterator[Prompt]:
        """Lines of a JSONL file: ``prompt`` with or without ``output_len``, or ``conversations`` as in ShareGPT."""
        lines = self._path().read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            item = _parse_json(line, f"line {number}") if line.strip() else None
            if item is None:
                continue
            if not isinstance(item, Mapping) or not ("prompt" in item or _turns(item)):
                raise ValueError(f"--dataset-path {self._path()}: line {number} has neither prompt nor conversations")
            if "prompt" in item:
                length = self._args.sharegpt_output_len or item.get("output_len") or self._args.random_output_len
                yield self._of_text(str(item["prompt"]), int(length))
            else:
                yield from self._conversations([_turns(item)])

    def _conversations(self, turns: list[list[str]]) -> Iterator[Prompt]:
        args = self._args
        self._rng.shuffle(turns)
        for question, *answers in turns:
            length = args.sharegpt_output_len or (self._count(answers[0]) if answers else args.random_output_len)
            prompt = self._of_text(question, length)
            too_long = args.sharegpt_context_len and prompt.prompt_len + length > args.sharegpt_context_len
            if min(prompt.prompt_len, length) >= _MIN_TOKENS and not too_long:
                yield prompt

    def _path(self) -> Path:
        path = self._args.dataset_path
        if path is None or not path.is_file():
            raise ValueError(f"--dataset-name {self._args.dataset_name} reads a file: give one as --dataset-path")
        return Path(path)

    def _length(self, most: int) -> int:
        """From ``--random-range-ratio`` times ``most`` to ``most``."""
        return self._rng.randint(max(int(most * self._args.random_range_ratio), 1), most)

    def _ids(self, length: int) -> list[int]:
        return self._rng.choices(self._ordinary, k=length)

    def _finish(self, ids: list[int], output_len: int) -> Prompt:
        """A prompt of random ids, as ids or as a text of about the same length."""
        if self._args.tokenize_prompt:
            return Prompt(tuple(ids), len(ids), output_len)
        length = len(ids)
        for _ in range(_ROUNDS):
            text = self._tokenizer.decode(ids)
            again = self._tokenizer.encode(text, add_special_tokens=False)
            if len(again) == length:
                break
            ids = again[:length] + self._ids(max(length - len(again), 0))
        return self._of_text(text, output_len)

    def _of_text(self, text: str, output_len: int) -> Prompt:
        if self._args.apply_chat_template:
            rendered = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            # the server adds its own
            text = str(rendered).removeprefix(self._tokenizer.bos_token or "")
        prompt = Prompt(text, self._count(text), output_len)
        if not self._args.tokenize_prompt:
            return prompt
        ids = tuple(self._tokenizer.encode(text))
        return replace(prompt, prompt=ids, prompt_len=len(ids))

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


_DATASETS: Mapping[str, Callable[[PromptMaker], Iterator[Prompt]]] = MappingProxyType(
    {
        "random": PromptMaker.random,
        "random-ids": PromptMaker.random,
        "generated-shared-prefix": PromptMaker.shared_prefix,
        "sharegpt": PromptMaker.sharegpt,
        "custom": PromptMaker.custom,
    }
)
DATASET_NAMES = tuple(_DATASETS)


def _read_json(path: Path) -> Any:
    return _parse_json(path.read_text(encoding="utf-8"), str(path))


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"--dataset-path: {where} is not valid JSON: {error}") from None


def _turns(item: Any) -> list[str]:
    """Texts of a conversation, in order; empty when it is none."""
    turns = item.get("conversations") or item.get("conversation") if isinstance(item, Mapping) else None
    texts = [turn.get("value", turn.get("content")) for turn in turns or [] if isinstance(turn, Mapping)]
    return [text for text in texts if isinstance(text, str)]
