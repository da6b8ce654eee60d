"""The endpoints of the engines that clients reach through the router: one table.

In:  a path.   Out: what kind of prompt its bodies have, and what its answers cost.

A request whose body has a prompt of a known kind goes by its prefix, every other one by load alone.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvplug.tokenization.prompt_kind import PromptKind


class Endpoint(NamedTuple):
    """A POST route of an engine, forwarded as it is.

    kind: of the prompt in a body; None if nothing is known of it. generates: whether an answer has
    tokens that the engine decodes. is_work: whether it keeps the engine's accelerator busy.
    """

    path: str
    summary: str
    kind: PromptKind | None = None
    generates: bool = False
    is_work: bool = True


ENDPOINTS: Final = (
    Endpoint("/v1/chat/completions", "answer a chat", PromptKind.CHAT, generates=True),
    Endpoint("/v1/completions", "complete a text", PromptKind.COMPLETION, generates=True),
    Endpoint("/v1/responses", "answer (OpenAI's Responses)", PromptKind.RESPONSES, generates=True),
    Endpoint("/v1/messages", "answer (Anthropic's)", PromptKind.MESSAGES, generates=True),
    Endpoint("/v1/messages/count_tokens", "count tokens (Anthropic's)", is_work=False),
    Endpoint("/v1/embeddings", "embed texts"),
    Endpoint("/v1/rerank", "rank documents (Jina's)"),
    Endpoint("/v2/rerank", "rank documents (Cohere's)"),
    Endpoint("/rerank", "rank documents"),
    Endpoint("/v1/score", "score pairs of texts"),
    Endpoint("/score", "score pairs of texts"),
    Endpoint("/pooling", "pool hidden states"),
    Endpoint("/classify", "classify texts"),
    Endpoint("/tokenize", "text to token ids", is_work=False),
    Endpoint("/detokenize", "token ids to text", is_work=False),
)
"""All of them take the name of a model in their body."""
