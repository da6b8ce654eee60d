"""The standalone router: a Router with events and HTTP around it.

config         ServerConfig
worker_spec    one engine, as --worker names it
settings_file  settings as YAML
cli            command line and environment -> ServerConfig
compilation    of the kernels, before anything is served
service        start, serve, stop
api/           the HTTP routes, and what a request's body says
control/       selections and reservations for gateways, workers that come and go
proxy/         from a client to a worker and back
nginx/         decisions for an nginx that forwards itself
workers/       the engines: which are up, what they serve, whether their events arrive
diagnosis/     what is wrong with the fleet's set-up
observability/ what an operator sees: health, metrics
"""
