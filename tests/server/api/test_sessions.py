import pytest

from kvplug.server.api.sessions import session_of

ALL_HEADERS = {"x-semantic-cluster-id": "c", "x-session-id": "s", "x-user-id": "u"}
ALL_FIELDS = {"session_params": {"session_id": "p"}, "session_id": "s", "user_id": "i", "user": "u"}


def test_headers_come_first_then_fields_each_in_their_order():
    headers, body, found = dict(ALL_HEADERS), dict(ALL_FIELDS), []
    while headers or body:
        session = session_of(headers, body, b"{}")
        found.append(session)
        name = session.partition(":")[0]
        headers.pop(name, None) or body.pop(name)
    assert found == [
        "x-semantic-cluster-id:c", "x-session-id:s", "x-user-id:u",
        "session_params:p", "session_id:s", "user_id:i", "user:u",
    ]  # fmt: skip


def test_without_any_equal_bodies_go_together():
    assert session_of({}, {}, b"1") == session_of({}, {}, b"1") != session_of({}, {}, b"2")


@pytest.mark.parametrize("value", [7, None, "", ["a"], {"a": 1}])
def test_what_is_no_text_is_no_session(value):
    body = {"session_id": value, "session_params": value, "user": "u"}
    assert session_of({}, body, b"") == "user:u"
