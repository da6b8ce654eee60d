"""For gateways that forward themselves, and for who runs the fleet: decisions without the proxy,
workers that come and go.

guard       who may ask
messages    what is asked and answered, field by field
selection   /select and /reservations
workers     /workers
openapi     all routes of the router, as OpenAPI has them
"""
