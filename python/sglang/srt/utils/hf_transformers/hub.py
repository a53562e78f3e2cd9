"""Where a model's files are: shipped with the package, in a directory, or on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from sglang.srt.utils.embedded import EMBEDDED_MODELS, embedded_model

Role = Literal["model", "draft", "tokenizer"]

_FLAGS: Mapping[Role, str] = MappingProxyType(
    {"model": "--model-path", "draft": "--speculative-draft-model-path", "tokenizer": "--tokenizer-path"}
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")
_ETAG_TIMEOUT_S = 5.0


def resolve_model_path(name_or_path: str, revision: str | None, *, role: Role, weights: bool = True) -> Path:
    """The local directory that ``name_or_path`` means.

    Tried in this order: the name of an embedded model (its assistant for role "draft"), a directory, an id
    ``organisation/name`` on the Hugging Face hub (downloaded at ``revision``, or taken from the local cache when the
    hub cannot be reached). ``weights=False`` leaves the safetensors files out of a download. Raises ``ValueError``
    naming the flag, its value and the fix.
    """
    flag = _FLAGS[role]
    shipped = embedded_model(name_or_path)
    if shipped is not None:
        return (shipped.assistant if role == "draft" else shipped.target).resolve()
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ValueError(f"{flag} {name_or_path!r} is a file: give the directory that holds it")
    if not _HUB_ID.fullmatch(name_or_path):
        names = ", ".join(EMBEDDED_MODELS)
        raise ValueError(
            f"{flag} {name_or_path!r} is not a directory: give a directory that exists, "
            f"a Hugging Face id (organisation/name) or an embedded model ({names})"
        )
    return _download(name_or_path, revision, flag, weights)


def embedded_assistant(model_path: str) -> Path | None:
    """The assistant shipped for this target (the name or directory of a shipped one), None when there is none."""
    for name, pair in EMBEDDED_MODELS.items():
        if model_path == name or Path(model_path).resolve() == pair.target.resolve():
            return pair.assistant.resolve()
    return None


def _download(repo_id: str, revision: str | None, flag: str, weights: bool) -> Path:
    # optional at run time: only a Hugging Face id needs it
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    where = f"{flag} {repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else list(_SMALL_FILES)
    try:
        return Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=patterns, etag_timeout=_ETAG_TIMEOUT_S)
        )
    except HFValidationError as err:
        raise ValueError(f"{where} is not a valid Hugging Face id: {_first_line(err)}") from err
    except GatedRepoError as err:
        raise ValueError(f"{where} is gated: accept its terms on the hub and log in with `hf auth login`") from err
    except RevisionNotFoundError as err:
        raise ValueError(f"{where} has no such revision: correct the revision or leave it out") from err
    except RepositoryNotFoundError as err:
        raise ValueError(f"{where} was not found on the hub: check the spelling, or give a local directory") from err
    except Exception as err:  # the client passes through whatever its HTTP library raises
        raise ValueError(
            f"{where} is not a local directory and could not be downloaded ({type(err).__name__}: {_first_line(err)}): "
            "check the network, or give a directory that holds the model"
        ) from err


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or ["no details"])[0][:200]
