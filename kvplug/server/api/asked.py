"""What a request asks for: its body to all that a decision needs.

In:  the raw body, the endpoint, the headers.   Out: a Forward, or ApiError.

Every way to ask the router goes through here: what it forwards itself, and what it decides for
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kvplug.api_errors import ApiError
from kvplug.server.api.bodies import (
    Body,
    lora_path_of,
    max_tokens_of,
    namespace_of,
    read_body,
    unauditable,
)
from kvplug.server.api.endpoints import Endpoint
from kvplug.server.api.prompts import Known, Prompts, Reason
from kvplug.server.api.sessions import session_of
from kvplug.server.config import ServerConfig
from kvplug.server.observability.journey import Step, current
from kvplug.server.proxy.additions import CONTINUED, Additions, usage_to_ask
from kvplug.server.proxy.asked import Forward
from kvplug.server.proxy.continuation import Continuation, is_continued
from kvplug.server.workers.fleet import Fleet
from kvplug.server.workers.model_cards import Served
from kvplug.setting import shown
from kvplug.tokenization.prompt_kind import PromptKind
from kvplug.tokenization.prompt_tokenizer import Extent, PromptIds

WORKER_HEADER: Final = "x-kvplug-worker"
"""Of --router-mode direct: a worker, as --worker names it."""


class Asked:
    """forward_of a raw body; model_of and tokens_of one that is read."""

    def __init__(self, config: ServerConfig, fleet: Fleet, prompts: Prompts) -> None:
        self._fleet, self._prompts = fleet, prompts
        self._uses_sessions = config.router.mode == "rendezvous_hash"
        self._is_direct = config.router.mode == "direct"
        self._migrates, self._asks_usage = config.migrate_streams, config.ask_usage
        self._needs_tokens = config.router.weighs_prompts
        self._engine_wait_s = config.engine_wait_timeout_s

    async def forward_of(
        self, raw: bytes, endpoint: Endpoint, headers: Mapping[str, str]
    ) -> Forward:
        """The request as it goes on; ApiError for a body that cannot be read, and for a model
        that nobody serves.
        """
        body = await read_body(raw)
        model, served = await self._awaited_model_of(body)
        current().mark(Step.PARSE)
        prompt, unknown_because = await self.tokens_of(body, (model, served), endpoint, len(raw))
        current().mark(Step.TOKENIZE)
        continuation = self._continuation_of(body, model, endpoint)
        asks_usage = self._asks_usage and endpoint.path in CONTINUED and usage_to_ask(body)
        return Forward(
            model=model,
            body=raw,
            tokens=None if prompt is None else prompt.ids,
            unknown_because=unknown_because,
            namespace=namespace_of(body, served.lora_name),
            max_tokens=max_tokens_of(body, endpoint.kind) if endpoint.generates else 0,
            streams=body.get("stream") is True,
            unauditable=unauditable(body) or _part_of(prompt),
            session=session_of(headers, body, raw) if self._uses_sessions else "",
            worker=headers.get(WORKER_HEADER, "") if self._is_direct else "",
            additions=Additions(usage=asks_usage, token_ids=continuation is not None),
            continuation=continuation,
        )

    def _continuation_of(self, body: Body, model: str, endpoint: Endpoint) -> Continuation | None:
        if not self._migrates or endpoint.path not in CONTINUED or not is_continued(body):
            return None
        longest = self._fleet.cards().get(model, {}).get("max_model_len")
        is_chat = endpoint.kind is PromptKind.CHAT
        return Continuation(body, is_chat=is_chat, longest=longest)

    async def tokens_of(
        self, body: Body, asked: tuple[str, Served], endpoint: Endpoint, size: int
    ) -> Known:
        """The prompt's token ids; where they are not known, a reason that is counted."""
        if endpoint.kind is None:
            return self._prompts.without(Reason.NO_PREFIX)
        if not self._needs_tokens and not _has_ids(body):
            return self._prompts.without(Reason.MODE)
        model, served = asked
        return await self._prompts.tokens_of(
            {**body, "model": served.base},
            served.root,
            kind=endpoint.kind,
            size=size,
            digests=self._fleet.tokenizers_of(model),
            names_extra_keys=self._fleet.names_extra_keys(model),
            engines=served.engines,
        )

    async def _awaited_model_of(self, body: Body) -> tuple[str, Served]:
        """model_of, as soon as a worker of the model is up, or was waited for long enough."""
        if not self._engine_wait_s:
            return self.model_of(body)
        try:
            async with asyncio.timeout(self._engine_wait_s):
                while self._fleet.may_grow:
                    changed = self._fleet.changed
                    with suppress(ApiError):
                        model, served = self.model_of(body)
                        if model in self._fleet.models:
                            return model, served
                    await changed.wait()
        except TimeoutError:
            pass
        return self.model_of(body)

    def model_of(self, body: Body) -> tuple[str, Served]:
        """The model that a body asks for, by the name that workers know it by; ApiError."""
        model, models = body.get("model"), self._fleet.models
        if model is None and len(models) == 1:
            [model] = models  # vLLM too takes a body without a model
        adapter = f"{model}:{lora_path_of(body)}"
        if adapter in models:
            model = adapter  # as SGLang names it
        if model is None and not models:
            raise ApiError(503, "no worker can be reached now", code="no_worker")
        if not isinstance(model, str):
            raise ApiError(400, "the body must name a model", code="model_required", param="model")
        if (served := self._fleet.served_as(model)) is not None:
            return model, served
        if models:
            message = f"the model {shown(model)} does not exist; served are: {', '.join(models)}"
            raise ApiError(404, message, code="model_not_found", param="model")
        message = f"no worker that serves model {shown(model)} can be reached now"
        raise ApiError(503, message, code="no_worker")


def _part_of(prompt: PromptIds | None) -> str | None:
    """Why the usage of an answer tells of more than the known tokens, or None."""
    is_whole = prompt is None or prompt.extent is Extent.WHOLE
    return None if is_whole else "part_of_prompt"


def _has_ids(body: Body) -> bool:
    """Whether the prompt needs no tokenizer."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)
