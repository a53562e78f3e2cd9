"""Command-line options that benchmarks share: which prompts to make."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sglang.benchmark.datasets import DATASET_NAMES


def add_dataset_options(parser: argparse.ArgumentParser) -> None:
    """What ``PromptMaker`` takes."""
    add = parser.add_argument_group("prompts").add_argument
    add("--dataset-name", choices=DATASET_NAMES, default="random")
    add("--dataset-path", type=Path, help="file of sharegpt (JSON) or custom (JSONL)")
    add("--num-prompts", type=count, default=1000)
    add("--seed", type=int, default=1)
    add("--tokenize-prompt", action="store_true", help="send token ids, whose number is exact")
    add("--apply-chat-template", action="store_true", help="wrap each text as a user's message first")
    add("--random-input-len", type=count, default=1024)
    add("--random-output-len", type=count, default=1024)
    add("--random-range-ratio", type=float, default=0.0, help="lengths are drawn from this part of them up to them")
    add("--sharegpt-output-len", type=count, help="default: as long as the answer in the file")
    add("--sharegpt-context-len", type=count, help="leave out what is longer, prompt and answer together")
    add("--gsp-num-groups", type=count, default=64, help="system prompts of generated-shared-prefix")
    add("--gsp-prompts-per-group", type=count, default=16, help="questions behind each of them")
    add("--gsp-system-prompt-len", type=count, default=2048)
    add("--gsp-question-len", type=count, default=128)
    add("--gsp-output-len", type=count, default=256)


def check_dataset_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with one sentence where they make no sense."""
    if not 0 <= args.random_range_ratio <= 1:
        parser.error(f"--random-range-ratio must be from 0 to 1, got {args.random_range_ratio}")


def count(text: str) -> int:
    """An integer above 0, as argparse takes its types."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, as argparse takes its types."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r:.200}")
    return value
