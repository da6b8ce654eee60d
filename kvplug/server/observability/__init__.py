"""What an operator sees.

health    what /health says
metrics   Prometheus; audit_metrics has the part of the audit, request_metrics that of requests
journey   one request: its steps, where it went, how it ended; following begins one for each
tracing   OpenTelemetry, if it is asked for
request_log   lines of the log, for people or as JSON
"""
