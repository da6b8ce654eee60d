"""Questions about a few long documents: what makes a prefix cache worth something.

In:  a number of requests and a seed.
Out: bodies for /v1/chat/completions, always the same ones in the same order.

The text is Python's own documentation as `help()` shows it, so that there is something real to
tokenize without a download. One engine's cache holds a bit more than half of the documents: all
of them fit only if the two engines share the work by document.
"""

import random
from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any

from examples.launch.engine_server import MODEL_NAME

NUM_DOCUMENTS = 16
# 560 to 780 of the tiny model's tokens, about 20 full blocks: a prompt stays below 1024 tokens.
DOCUMENT_CHARS = 2700
MAX_TOKENS = 8
SEED = 1

INSTRUCTION = "Answer from this text:\n"
QUESTIONS = (
    "What is this text about?",
    "Sum it up in one sentence.",
    "Which terms does it define?",
    "Give one example from it.",
    "Which errors can be raised?",
    "What changed between versions?",
    "Who should read this first?",
    "What is said about names and scopes?",
    "Which statement is explained in most detail?",
    "What does it say about special methods?",
    "Which other sections are referred to?",
    "What would surprise a beginner?",
    "Which rule has an exception?",
    "What is left to the implementation?",
    "Which keyword matters most?",
    "What should be read next?",
    "Which operations are compared?",
    "What happens in the simplest case?",
    "Is anything here deprecated?",
    "Which objects take part?",
)

ChatRequest = Mapping[str, Any]


def documents(num_documents: int = NUM_DOCUMENTS) -> list[str]:
    """Passages of equal length from different topics."""
    long_enough = [name for name in sorted(topics) if len(topics[name]) >= DOCUMENT_CHARS]
    return [topics[name][:DOCUMENT_CHARS] for name in long_enough[:num_documents]]


def make_requests(
    num_requests: int, num_documents: int = NUM_DOCUMENTS, *, seed: int = SEED
) -> list[ChatRequest]:
    """Every document as often as the others, its questions in turn, in a shuffled order."""
    texts = documents(num_documents)
    requests = [
        chat_request(texts[i % len(texts)], QUESTIONS[i // len(texts) % len(QUESTIONS)])
        for i in range(num_requests)
    ]
    random.Random(seed).shuffle(requests)
    return requests


def chat_request(document: str, question: str) -> ChatRequest:
    """One question; the document comes first, so that questions about it share a prefix."""
    return {
        "model": MODEL_NAME,
        "messages": [
            {"role": "system", "content": INSTRUCTION + document},
            {"role": "user", "content": question},
        ],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
