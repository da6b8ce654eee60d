"""What an operator sees.

health             the body of /health
metrics            all of Prometheus' text, made of the next three and the router's own numbers
request_metrics    of requests, their steps and times
tokenizer_metrics  of remembered texts
audit_metrics      of the audit
histogram          a histogram that is cheap to add to
journey            one request: its steps, where it went, how it ended
following          begins a journey for each request
tracing            OpenTelemetry, if it is asked for
request_log        lines of the log, for people or as JSON
"""
