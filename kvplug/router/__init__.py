"""Deciding which worker gets a request.

core              Router: the request path, readable in one screen
config            RouterConfig: every setting, checked once
arguments         what callers give, checked
options           what a caller may say of a request besides its prompt
decider           the decision: candidates, one kernel call, one rank
constraints       who may take a request
policies          one rank of the candidates, for each router mode
group_arrays      the arrays that the routing kernel reads, for one index
followed_fleet    the workers of a Router, and what their events say
fleet_index       one index for each model and block size of the fleet
index_group       one of them, with the ranks in it
load              requests in flight on each rank, and cache sizes
output_blocks     blocks of answers, and their decay
reported_load     what engines say of their load, and what of it is others'
first_tokens      the end of a prefill, where nobody reports it
bookings          requests that others have placed
migration         a request goes on elsewhere when its worker has failed
matches           what each rank has of a prompt, by name
moe               blocks of a prompt with an expert label, by rank
potential_loads   what each rank would be busy with
cache_forecast    what the caches will hold once the routed requests are served
cache_sizes       how many blocks each rank holds and has room for
engine_model      how long an engine takes, and how that is fitted
engine_speeds     the fitted model of each rank
observer          what a Router reports of decisions and events
query_first_lock  queries go before ingestion
"""
