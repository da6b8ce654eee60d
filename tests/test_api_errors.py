"""Errors as clients of OpenAI's API read them."""

import json

import pytest

from kvplug.api_errors import ApiError, error_body, error_event, error_response


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (499, "invalid_request_error"), (500, "server_error")],
)
def test_the_type_is_openais_for_the_status(status, kind):
    error = ApiError(status, "a sentence", code="a_code", param="model")
    body = {"message": "a sentence", "type": kind, "param": "model", "code": "a_code"}
    assert error_body(error) == {"error": body}


def test_a_type_of_ones_own_goes_before():
    error = ApiError(404, "no such model", code=404, kind="NotFoundError")
    assert error_body(error)["error"]["type"] == "NotFoundError"
    assert error_body(error)["error"]["code"] == 404


def test_an_answer_and_an_event_say_the_same():
    error = ApiError(503, "nobody is there", code="no_worker")
    response = error_response(error)
    assert response.status == 503
    event = error_event(error)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert json.loads(response.body) == json.loads(event.removeprefix(b"data: "))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, "not_found_error"),
        (418, "invalid_request_error"),
        (500, "api_error"),
        (429, "rate_limit_error"),
    ],
)
def test_of_messages_they_have_anthropics_form(status, kind):
    error = ApiError(status, "a sentence", code="a_code", retry_after_s=3)
    body = {"type": "error", "error": {"type": kind, "message": "a sentence"}}
    assert error_body(error, "/v1/messages") == body
    assert error_response(error, "/v1/messages").headers["Retry-After"] == "3"
    event = error_event(error, "/v1/messages/count_tokens")
    assert event.startswith(b"event: error\ndata: ")
