"""What a policy would have done: requests x fleets x policies, in virtual time.

workload   requests: of a trace, of a log, made up
engine     one engine: its cache, its queue, its steps
policies   who gets a request
fleet      engines and a policy, from the first request to the last answer
"""
