"""Which API a body with a prompt came by, and what reads it: each does it in its own way."""

from __future__ import annotations

from enum import StrEnum


class PromptKind(StrEnum):
    """The form of a body."""

    COMPLETION = "completion"  # OpenAI's /v1/completions
    CHAT = "chat"  # OpenAI's /v1/chat/completions
    RESPONSES = "responses"  # OpenAI's /v1/responses
    MESSAGES = "messages"  # Anthropic's /v1/messages


class Engine(StrEnum):
    """What makes a prompt of a body: each does it in its own way."""

    VLLM = "vllm"
    SGLANG = "sglang"
