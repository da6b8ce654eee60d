"""The standalone router: a Router with events and HTTP around it.

config         ServerConfig
worker_spec    one engine, as --worker gives it
settings_file  settings as YAML
cli            command line and environment -> ServerConfig
compilation    of the kernels, before anything is served
service        start, serve, stop
api/           the HTTP routes, and what a request's body says
control/       selections and reservations for gateways, workers that change at run time
proxy/         from a client to a worker and back, and the connections on both sides
nginx/         decisions for an nginx that forwards the bytes
processes/     several processes that serve as one router
workers/       the engines: which are up, what they serve, whether their events arrive
diagnosis/     what is wrong with the fleet's set-up
observability/ what an operator sees: health, metrics, logs, traces
"""
