"""The session of a request, for `--router-mode rendezvous_hash`.

In:  headers and body.   Out: a text; requests with equal texts go to one worker.

The first of these that a request has, in the order of vLLM's router: the headers
x-semantic-cluster-id, x-session-id and x-user-id; the fields of the body session_params.session_id,
session_id, user_id and user; else the body itself, so that equal requests go together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import xxhash

_HEADERS: Final = ("x-semantic-cluster-id", "x-session-id", "x-user-id")
_FIELDS: Final = ("session_id", "user_id", "user")


def session_of(headers: Mapping[str, str], body: Mapping[str, Any], raw: bytes) -> str:
    """Never empty. Where the text is from is part of it: a user's name is no session id."""
    for name in _HEADERS:
        if value := headers.get(name):
            return f"{name}:{value}"
    params = body.get("session_params")
    nested = params.get("session_id") if isinstance(params, dict) else None
    values = {"session_params": nested, **{field: body.get(field) for field in _FIELDS}}
    for field, value in values.items():
        if isinstance(value, str) and value:
            return f"{field}:{value}"
    return f"body:{xxhash.xxh3_128_hexdigest(raw)}"
