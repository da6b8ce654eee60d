"""What the router expected to be cached, against what the engines report.

audit           Audit: observes a Router, and compares its decisions with answers
expectation     what was expected of one request, and the verdict on it
evidence        what may explain a shortfall: when events were sent, who overtook whom
ledger          per rank: verdicts, errors, accuracy
contradictions  engines that reuse less than their events say

Knows neither HTTP nor sockets: an in-process router is audited the same way.
"""
