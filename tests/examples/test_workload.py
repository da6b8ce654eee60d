"""The workload is the same on every run, and shaped as the demo needs it."""

from collections import Counter

from examples.demo.workload import (
    DOCUMENT_CHARS,
    NUM_DOCUMENTS,
    QUESTIONS,
    documents,
    make_requests,
)


def document_of(request):
    return request["messages"][0]["content"]


def question_of(request):
    return request["messages"][1]["content"]


def test_documents_differ_from_the_first_block_on():
    starts = {document[:60] for document in documents()}
    assert len(starts) == NUM_DOCUMENTS
    assert {len(document) for document in documents()} == {DOCUMENT_CHARS}


def test_the_order_depends_on_the_seed_alone():
    assert make_requests(40) == make_requests(40)
    assert make_requests(40) != make_requests(40, seed=2)
    by_text = sorted(map(repr, make_requests(40)))
    assert by_text == sorted(map(repr, make_requests(40, seed=2)))


def test_every_document_is_asked_about_equally_often_and_always_something_else():
    requests = make_requests(NUM_DOCUMENTS * len(QUESTIONS))
    assert set(Counter(map(document_of, requests)).values()) == {len(QUESTIONS)}
    assert len({(document_of(r), question_of(r)) for r in requests}) == len(requests)


def test_one_request_is_enough():
    (request,) = make_requests(1)
    assert request["stream_options"] == {"include_usage": True}
