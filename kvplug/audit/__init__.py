"""What the router expected to be cached, against what the engines report.

router       AuditedRouter: a Router whose decisions are compared with answers
expectation  what was expected of one request, and the verdict on it
event_times  when an engine said something, on the router's clock
overtaking   two requests with one prefix that changed places on their way
ledger       per rank: verdicts, errors, accuracy
residency    what the index holds of a request, speculative blocks aside

Knows neither HTTP nor sockets: an in-process router is audited the same way.
"""
