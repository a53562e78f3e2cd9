"""Depth of speculation: defaults by target size, and values that follow from one another."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang.srt.configs.model_config import TextConfig

_FALLBACK_STEPS = 3
_ADAPTIVE_MORE = 3  # drafts than the default, at most, where easy text is worth them
MAX_TREE_ROWS = 16  # rows per request that attention kernels take in one step

# (hidden_size, num_layers, mixture of experts) -> (name of the size, steps). A verified token of a mixture of experts
# touches further experts, so its chains are shorter; the larger a dense target, the more a good draft saves.
_STEPS_BY_SHAPE: Mapping[tuple[int, int, bool], tuple[str, int]] = MappingProxyType(
    {
        (1536, 35, False): ("E2B", 2),
        (2560, 42, False): ("E4B", 3),
        (3840, 48, False): ("12B", 4),
        (2816, 30, True): ("26B-A4B", 3),
        (5376, 60, False): ("31B", 5),
        (256, 8, False): ("tiny", 4),
    }
)


def default_num_steps(target: TextConfig) -> tuple[int, str]:
    """(drafts per round for this target, how that was chosen)."""
    shape = (target.hidden_size, target.num_layers, target.moe is not None)
    if shape in _STEPS_BY_SHAPE:
        name, steps = _STEPS_BY_SHAPE[shape]
        return steps, f"the default for a target of size {name}"
    return _FALLBACK_STEPS, "the default for a target of no known size"


def longest_adaptive(default: int, reason: str, context_length: int) -> tuple[int, str]:
    """(most drafts per round where the length adapts, how that was chosen), from the same for a length that stays."""
    longest = max(default, min(default + _ADAPTIVE_MORE, context_length - 2))
    return longest, f"{reason} ({default}) and {longest - default} more for rounds of adaptive length"


def complete_shape(
    num_steps: int | None, topk: int | None, num_draft_tokens: int | None, default: int
) -> tuple[int, int, int]:
    """Consistent (num_steps, topk, num_draft_tokens): a chain has one token per step and the root, a tree as many as
    asked for.

    ``ValueError`` names all three flags when they contradict each other.
    """
    topk = 1 if topk is None else topk
    if num_steps is None:
        num_steps = default if num_draft_tokens is None or topk > 1 else num_draft_tokens - 1
    if topk == 1:
        most = least = num_steps + 1
    else:
        # the children of the root, then K children of each of the K best in every further step
        least, most = 2, 1 + topk + (num_steps - 1) * topk * topk
    if num_draft_tokens is None:
        num_draft_tokens = most if topk == 1 else min(1 + topk * num_steps, MAX_TREE_ROWS)
    if not least <= num_draft_tokens <= most:
        what = f"a chain has num-steps + 1 = {most} draft tokens; give only --speculative-num-steps"
        if topk > 1:
            what = f"such a tree has from {least} to {most} draft tokens"
        raise ValueError(
            f"--speculative-num-steps {num_steps}, --speculative-eagle-topk {topk} and --speculative-num-draft-tokens "
            f"{num_draft_tokens} do not fit together: {what}"
        )
    return num_steps, topk, num_draft_tokens


def check_tree(
    target: TextConfig,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    *,
    attention_backend: str | None,
    sampled: bool,
) -> None:
    """``ValueError`` for trees that this target or the rest of the arguments have no room for."""
    tree = f"--speculative-eagle-topk {topk}"
    if sampled:
        raise ValueError(
            f"--speculative-use-rejection-sampling draws chains, and {tree} asks for trees: leave out one of the two"
        )
    if attention_backend == "triton" and num_draft_tokens > MAX_TREE_ROWS:
        raise ValueError(
            f"--speculative-num-draft-tokens {num_draft_tokens} with {tree} is more than --attention-backend triton "
            f"takes: use at most {MAX_TREE_ROWS}"
        )
    windows = [spec.window for spec in target.kv_layout.layers if spec.window is not None]
    if windows and num_steps >= min(windows):
        raise ValueError(
            f"--speculative-num-steps {num_steps} with {tree} must be below the target's attention window of "
            f"{min(windows)} tokens"
        )


def draft_missing(algorithm: str | None) -> str:
    """What to tell somebody who asked for speculation without a draft model."""
    return (
        f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path: give the assistant that belongs "
        "to the target (for google/gemma-4-E2B-it it is google/gemma-4-E2B-it-assistant)"
    )
