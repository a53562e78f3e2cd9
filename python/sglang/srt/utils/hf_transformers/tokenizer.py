"""The tokenizer of a checkpoint directory, always from local files."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast


def load_tokenizer(path: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    """Load the fast tokenizer in ``path``.

    Raises ``ValueError`` in one sentence when the directory has none, it is damaged, or it has no fast form.
    """
    fix = "give a directory with a complete tokenizer as --tokenizer-path"
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ValueError(f"{path} has neither tokenizer.json nor tokenizer.model: {fix}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as err:  # the library raises many types, among them bare Exception from its Rust part
        detail = (str(err).strip().splitlines() or [type(err).__name__])[0][:200]
        raise ValueError(f"the tokenizer in {path} cannot be loaded ({detail}): {fix}") from err
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"the tokenizer in {path} has no fast form ({type(tokenizer).__name__}): {fix}")
    return tokenizer


def has_chat_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the tokenizer brings a chat template, which ``/v1/chat/completions`` needs."""
    return bool(tokenizer.chat_template)
