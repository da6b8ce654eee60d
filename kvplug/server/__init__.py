"""The standalone router: a Router with events and HTTP around it.

config         ServerConfig, WorkerSpec
cli            command line and environment -> ServerConfig
compilation    of the kernels, before anything is served
service        start, serve, stop
listening      which connections are accepted
app            the HTTP routes
bodies         a request's body: what routing needs of it, what it asks for
prompts        its token ids, from kvplug.tokenization, or the reason why there are none
proxy          one request to a worker and back
upstream       one POST to a worker, and whose fault a failure is
answers        what they say of their tokens; where the events of a stream end
fleet          the workers: reachable or not, their models, their event streams
worker_url     where a worker's API is, if only its publisher says it
rank_sources   where an engine publishes the events of each rank; hosts says who reaches that
worker_events  a follower for each of them
model_cards    what an engine says it serves
diagnosis      what is wrong with the fleet's set-up
health         what /health says
metrics        Prometheus; audit_metrics has the part of the audit
"""
