"""What the Hub's refusals mean, and what the connection's own errors are called."""

from __future__ import annotations

import sys

from huggingface_hub import constants, errors, get_session

from chord_runtime.errors import SourceError

ADVICE = {
    401: "check the token (`hf auth whoami`)",
    403: "check that the token may read this repository",
    404: "the file is gone from the storage; run again",
}


def refusal(repo: str, error: errors.HfHubHTTPError) -> str:
    """What a 4xx answer of the Hub means and what to do about it."""
    status = error.response.status_code
    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo}: the repository is gated (HTTP {status}); accept its conditions at {page}, then pass a token of "
            "that account by --token, HF_TOKEN or `hf auth login`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo}: no such revision (HTTP {status}); pick a branch, tag or commit listed at {page}/commits."
    if isinstance(error, errors.EntryNotFoundError):
        return f"{repo}: a file is listed but not there (HTTP {status}): {_last_line(error)}; see {page}/tree/main."
    if isinstance(error, errors.DisabledRepoError):
        return f"{repo}: the Hub has disabled this repository (HTTP {status}); see {page}."
    if status == 401 and not isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo}: the Hub does not accept the token (HTTP 401); check it with `hf auth whoami`, or pass --token."
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return (
            f"{repo}: no such repository, or it is private (HTTP {status}); check the spelling, and pass a token "
            "that may read it by --token, HF_TOKEN or `hf auth login`."
        )
    if status == 403:
        return (
            f"{repo}: the token may not read this repository (HTTP 403); give it read access to the repository "
            "(fine-grained tokens need it by name), or pass another by --token."
        )
    return f"{repo}: the Hub answered HTTP {status}: {_last_line(error)}; see {page}."


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def transport_errors() -> tuple[type[Exception], ...]:
    """Errors of the connection itself. huggingface_hub 1.x rests on httpx, 2.x on httpx2: its client's module tells."""
    for kind in type(get_session()).__mro__:
        error = getattr(sys.modules[kind.__module__.partition(".")[0]], "TransportError", None)
        if error is not None:
            return (error,)
    raise SourceError("huggingface_hub uses an HTTP client that is not known here; install huggingface-hub >= 1.0.")
