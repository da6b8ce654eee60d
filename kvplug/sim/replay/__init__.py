"""What a policy would have done: requests x fleets x policies, in virtual time.

workload   requests: made up by a recipe
traces     requests: of a trace or a log
engine     one engine: its cache, its queue, its steps
specs      how large and fast engines are, of flags or a file
policies   who gets a request
fleet      engines and a policy, from the first request to the last answer
study      many replays over all cores: summaries, intervals
report     a table, JSON, a plot
cli        the command line of `python -m kvplug.sim`
"""
