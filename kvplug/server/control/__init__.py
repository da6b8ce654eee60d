"""For gateways that forward requests themselves, and for operators: decisions without the proxy,
workers that change at run time.

guard       who may use these routes
messages    requests and answers of these routes, field by field
selection   /select and /reservations
workers     /workers
openapi     all routes of the router, as an OpenAPI document
"""
