"""The configuration of an nginx that asks the router where each request goes.

In:  NginxConfiguration.   Out: the text of a file that `nginx -c FILE` takes as it is.

nginx sends a request with its body to the router, on a Unix socket that no client reaches. The
answer has no body: `X-Accel-Redirect: @worker` sends the same request on to a named location, which
keeps method, URI and body, and headers say which address to take. So workers come and go without a
reload. Where the worker cannot be reached, or goes away before it answers, nginx asks again. When a
request is over, for whatever reason, the access log says so in a datagram.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvplug.api_errors import ApiError, error_body
from kvplug.http_service import RANK_HEADER
from kvplug.server.observability.journey import REQUEST_ID as JOURNEY_ID

WORKER_URL: Final = "X-Kvplug-Url"
WORKER_HOST: Final = "X-Kvplug-Host"
WORKER_RANK: Final = "X-Kvplug-Rank"
TRACE: Final = "X-Kvplug-Trace"
"""In the router's answers: where the request goes. Clients never see them."""
REQUEST_ID: Final = "X-Kvplug-Request"
CONNECTED: Final = "X-Kvplug-Connected"
STATUS: Final = "X-Kvplug-Status"
"""In nginx's questions: its own id of the request; how the worker before failed. nginx sets them
whatever a client sent.
"""
MARK: Final = "# Written by kvplug at each start of its router; changes are lost."
"""First line of the file."""

# A longer body goes through a file.
_BODY_IN_MEMORY: Final = 2**20

_DOWN: Final = ApiError(503, "the router cannot be reached now; try again", code="router_down")
_LOST: Final = ApiError(502, "no worker answered", code="worker_lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class NginxConfiguration:
    """What the file says. listen: of nginx, as HOST:PORT; decisions: the router's Unix socket;
    ends: where datagrams go, as HOST:PORT; folder: for the files that nginx makes; num_files: how
    many it may have open; endpoints: the paths that clients reach; user: of its workers if root
    starts it, and their group, None for what nginx takes by itself; times in seconds.
    """

    listen: str
    decisions: Path
    ends: str
    folder: Path
    max_body_bytes: int
    connect_timeout_s: float
    request_timeout_s: float
    client_timeout_s: float
    num_files: int
    endpoints: Sequence[str]
    user: tuple[str, str] | None = None

    @property
    def text(self) -> str:
        """The whole file."""
        return f"{MARK}\n{self._main}http {{\n{self._http}{self._server}}}\n"

    @property
    def _main(self) -> str:
        return f"""\
{self._user}worker_processes auto;
worker_rlimit_nofile {self.num_files};
pid {self.folder}/nginx.pid;
error_log {self.folder}/nginx-error.log warn;
# A stream takes two: to the client and to the worker.
events {{ worker_connections {max(self.num_files // 2, 512)}; }}
"""

    @property
    def _user(self) -> str:
        """One that may connect to the router's socket."""
        if self.user is None:
            return ""
        name, group = self.user
        return f'# Counts if root starts nginx, which warns otherwise.\nuser "{name}" "{group}";\n'

    @property
    def _http(self) -> str:
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "\n".join(f"  {kind}_temp_path {self.folder}/{kind};" for kind in kinds)
        # Sooner than the router closes them.
        kept_s = min(30.0, self.client_timeout_s / 2)
        return f"""\
  server_tokens off;
{temporary}
  client_max_body_size {self.max_body_bytes};
  client_body_buffer_size {min(_BODY_IN_MEMORY, self.max_body_bytes)};
  client_header_timeout {_time(self.client_timeout_s)};
  client_body_timeout {_time(self.client_timeout_s)};
  keepalive_timeout {_time(self.client_timeout_s)};
  reset_timedout_connection on;
  # One datagram when a request is over; "done" is empty where the client left.
  log_format kvplug escape=json '{{"id":"$request_id","status":$status,"bytes":$body_bytes_sent,'
    '"done":"$request_completion","upstream":"$upstream_status","connect":"$upstream_connect_time",'
    '"header":"$upstream_header_time","total":$request_time}}';
  access_log syslog:server={self.ends},nohostname,tag=kvplug kvplug;
  upstream kvplug_router {{
    server unix:{self.decisions};
    keepalive 256;
    keepalive_timeout {_time(kept_s)};
  }}
  # A client's own, if it is sane.
  map $http_x_request_id $kvplug_request_id {{
    "~^[!-~]{{1,128}}$" $http_x_request_id;
    default $request_id;
  }}
  proxy_hide_header {JOURNEY_ID};
  proxy_http_version 1.1;
  proxy_next_upstream off;
  proxy_buffering off;
"""

    @property
    def _server(self) -> str:
        paths = "|".join(re.escape(path) for path in self.endpoints)
        return f"""\
  server {{
    listen {self.listen};
    default_type application/json;
    recursive_error_pages on;
    # TLS, further ports, limits: directives of a server block, one file or more.
    include {self.folder}/nginx.d/*.conf;
    set $kvplug_url "";
    add_header {JOURNEY_ID} $kvplug_request_id always;
    location / {{
      return 404 '{_error(ApiError(404, "no such route", code="no_such_route"))}';
    }}
    location ~ ^(?:{paths})$ {{
{self._question('""', '""')}
    }}
    location ~ ^/v1/models/ {{
{self._question('""', '""')}
    }}
    # A named location keeps method, URI and body. Its address is in the answer of the router, which
    # is still the last upstream here.
    location @worker {{
      set $kvplug_url $upstream_http_{_variable(WORKER_URL)};
      set $kvplug_host $upstream_http_{_variable(WORKER_HOST)};
      set $kvplug_rank $upstream_http_{_variable(WORKER_RANK)};
      set $kvplug_trace $upstream_http_{_variable(TRACE)};
{self._explained}
      proxy_pass $kvplug_url$request_uri;
      proxy_set_header {JOURNEY_ID} $kvplug_request_id;
      proxy_set_header traceparent $kvplug_trace;
      proxy_set_header Host $kvplug_host;
      proxy_set_header {RANK_HEADER} $kvplug_rank;
      proxy_set_header {REQUEST_ID} "";
      proxy_set_header {STATUS} "";
      proxy_set_header {CONNECTED} "";
      # An engine sends nobody elsewhere, and turns nothing on.
      proxy_ignore_headers X-Accel-Redirect X-Accel-Expires X-Accel-Limit-Rate X-Accel-Buffering
        X-Accel-Charset;
      proxy_connect_timeout {_time(self.connect_timeout_s)};
      proxy_send_timeout {_time(self.request_timeout_s)};
      proxy_read_timeout {_time(self.request_timeout_s)};
      # Made by nginx itself, so before the first byte of an answer; an engine's own pass.
      error_page 502 504 = @again;
    }}
    location @again {{
{self._question("$upstream_status", "$upstream_connect_time")}
    }}
    location @down {{
      return 503 '{_error(_DOWN)}';
    }}
    location @too_large {{
      return 413 '{_error(self._too_large)}';
    }}
  }}
"""

    @property
    def _explained(self) -> str:
        """Empty headers are not added; nor are those of the server, where a location has some."""
        lines = [f"      add_header {JOURNEY_ID} $kvplug_request_id always;"]
        for name in ("worker", "overlap", "cost", "reason"):
            lines.append(f"      set $kvplug_said_{name} $upstream_http_x_kvplug_{name};")
            lines.append(f"      add_header x-kvplug-{name} $kvplug_said_{name} always;")
        return "\n".join(lines)

    @property
    def _too_large(self) -> ApiError:
        message = f"the body is too large: expected at most {self.max_body_bytes} bytes"
        return ApiError(413, message, code="body_too_large")

    def _question(self, status: str, connected: str) -> str:
        return f"""\
      proxy_pass http://kvplug_router;
      proxy_set_header Host $http_host;
      proxy_set_header Connection "";
      proxy_set_header {REQUEST_ID} $request_id;
      proxy_set_header {JOURNEY_ID} $kvplug_request_id;
      proxy_set_header {STATUS} {status};
      proxy_set_header {CONNECTED} {connected};
      proxy_read_timeout {_time(self.request_timeout_s)};
      error_page 502 504 = @down;
      error_page 413 = @too_large;"""


def _variable(header: str) -> str:
    return header.lower().replace("-", "_")


def _time(seconds: float) -> str:
    """In nginx's words, at least a millisecond."""
    return f"{max(1, round(seconds * 1e3))}ms"


def _error(error: ApiError) -> str:
    """JSON between single quotes; `$` would be a variable."""
    text = json.dumps(error_body(error))
    assert not set("'$\\") & set(text)
    return text
