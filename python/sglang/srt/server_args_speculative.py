"""Depth of speculation: defaults by target size, and values that follow from one another."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sglang.srt.configs.model_config import TextConfig

_FALLBACK_STEPS = 3

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


def complete_chain(
    num_steps: int | None, topk: int | None, num_draft_tokens: int | None, default: int
) -> tuple[int, int, int]:
    """Consistent (num_steps, topk, num_draft_tokens) of a chain: one token per step, and the root.

    ``ValueError`` names all three flags when they contradict each other, and topk when it asks for a tree.
    """
    topk = 1 if topk is None else topk
    if topk > 1:
        raise ValueError(f"--speculative-eagle-topk {topk} asks for draft trees, which are not supported yet: use 1")
    if num_steps is None:
        num_steps = default if num_draft_tokens is None else num_draft_tokens - 1
    if num_draft_tokens is None:
        num_draft_tokens = num_steps + 1
    if num_draft_tokens != num_steps + 1:
        raise ValueError(
            f"--speculative-num-steps {num_steps}, --speculative-eagle-topk {topk} and --speculative-num-draft-tokens "
            f"{num_draft_tokens} do not fit together: a chain has num-steps + 1 = {num_steps + 1} draft tokens; "
            "give only --speculative-num-steps"
        )
    return num_steps, topk, num_draft_tokens
