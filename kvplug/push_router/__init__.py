"""Requests sent to the engines that a Router chooses, answered as one stream of tokens.

In:  token ids, a Router, a client of the engines.   Out: tokens, though engines may fail meanwhile.

push_router.py has KvPushRouter, exchange.py a request and its engines' answers; client.py says what
a client is, vllm.py and sglang.py have one each, over HTTP (http_client.py).
"""

from kvplug.push_router.client import Output, WorkerClient
from kvplug.push_router.exchange import TokenStream
from kvplug.push_router.push_router import KvPushRouter
from kvplug.push_router.request import GenerateRequest, SamplingOptions, StopConditions
from kvplug.push_router.sglang import SglangClient
from kvplug.push_router.vllm import VllmClient

__all__ = [
    "GenerateRequest",
    "KvPushRouter",
    "Output",
    "SamplingOptions",
    "SglangClient",
    "StopConditions",
    "TokenStream",
    "VllmClient",
    "WorkerClient",
]
