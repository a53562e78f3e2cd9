"""Questions with known answers, drawn from the corpus recipe of the shipped pair."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedTokenizerBase

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny_gemma4"


@dataclass(frozen=True, slots=True)
class Question:
    """What a user asks, and the text the trained model should answer."""

    task: str
    text: str
    answer: str


@lru_cache(maxsize=1)
def corpus() -> ModuleType:
    """The recipe's ``corpus.py``, which is a script beside its data and not an installed package."""
    spec = importlib.util.spec_from_file_location("tiny_gemma4_corpus", RECIPE / "corpus.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def task_names() -> list[str]:
    return [task.__name__ for task, _ in corpus().TASKS]


def questions(task: str, num: int, seed: int) -> list[Question]:
    """``num`` different questions of one task; ``ValueError`` names the known tasks."""
    known: dict[str, Callable[[random.Random], tuple[str, str | None, str]]] = {
        function.__name__: function for function, _ in corpus().TASKS
    }
    if task not in known:
        raise ValueError(f"unknown task {task!r}: known tasks are {', '.join(known)}")
    # a string seed keeps tasks independent of each other and of the hash seed
    rng = random.Random(f"{task} {seed}")
    found: dict[str, Question] = {}
    for _ in range(100 * num):
        if len(found) == num:
            break
        text, _thought, answer = known[task](rng)
        found.setdefault(text, Question(task, text, answer.strip()))
    if len(found) < num:
        raise ValueError(f"task {task!r} has only {len(found)} different questions, {num} were asked for")
    return list(found.values())


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a chat with one user message, up to where the model answers."""
    chat = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, add_special_tokens=False).input_ids
