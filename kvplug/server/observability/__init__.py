"""What an operator sees.

health    what /health says
metrics   Prometheus; audit_metrics has the part of the audit
"""
