"""Turn a checkpoint's name into a local directory: a path as it is, a hub id through the hub's cache."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from audit.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")


def resolve(ref: str, revision: str | None = None) -> tuple[Path, str | None]:
    """Return the directory that holds a checkpoint, downloading it when `ref` is a hub id.

    Parameters
    ----------
    ref : str
        Local directory, or hub id such as ``org/name``.
    revision : str, optional
        Branch, tag or commit on the hub.

    Returns
    -------
    directory : Path
    revision : str or None
        Commit that the hub resolved; None for a local directory.

    Raises
    ------
    CheckpointError
        When there is no such directory, and no such repository that can be reached.
    """
    directory = Path(ref).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"checkpoint {ref}: a local directory has no revision {revision!r}; remove the revision"
            )
        return directory, None
    if directory.exists():
        raise CheckpointError(
            f"checkpoint {ref}: this is a file; name the directory that holds config.json and the weights"
        )
    if _is_path(ref):
        raise CheckpointError(f"checkpoint {ref}: there is no such directory; mend the path")
    return _fetch(ref, revision)


def _is_path(ref: str) -> bool:
    """Tell a mistyped path from a hub id: a hub id has one slash, and no folder here before it."""
    parent = Path(ref).parent
    return _HUB_ID.fullmatch(ref) is None or (parent != Path() and parent.is_dir())


def _fetch(ref: str, revision: str | None) -> tuple[Path, str | None]:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"checkpoint {ref}: no such directory, and hub ids need the capture extra; "
            "pip install 'rollout-audit[capture]'"
        ) from None
    from audit.models.digests import weight_candidates, weight_files

    def download(patterns: Sequence[str], at: str | None) -> Path:
        return Path(
            snapshot_download(ref, revision=at, allow_patterns=list(patterns), ignore_patterns="*/*.py")
        )

    try:
        directory = download(_SMALL_FILES, revision)
        commit = directory.name
        for names in weight_candidates(directory):
            if weight_files(directory, ref):
                break
            download(names, commit)
    except CheckpointError:
        raise
    except Exception as error:  # the hub's client raises its HTTP library's errors too
        raise _hub_error(ref, revision, error) from None
    return directory, commit


def _hub_error(ref: str, revision: str | None, error: Exception) -> CheckpointError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        problem = "the hub asks for its terms to be accepted; accept them on its page and set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = f"the hub has no revision {revision!r} of it; name a branch, tag or commit that exists"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = "no such directory, and on the hub it is private or absent; mend the name, or set HF_TOKEN"
    elif isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        problem = "the hub refuses access; set HF_TOKEN to a token that may read it"
    else:
        problem = (
            f"no such directory, not in the hub's cache, and the hub is {_unreachable()}; download it "
            "beforehand or name a local directory (a private or gated one needs HF_TOKEN)"
        )
    return CheckpointError(f"checkpoint {ref}: {problem}")


def _unreachable() -> str:
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    return "switched off by HF_HUB_OFFLINE" if offline else "out of reach"
