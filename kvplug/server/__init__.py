"""Fourth floor: a Router with events and HTTP around it.

config         ServerConfig, WorkerSpec
cli            command line -> ServerConfig
compilation    of the kernels, before anything is served
service        start, serve, stop
app            the HTTP routes
proxy          one request to a worker and back
fleet          the workers: reachable or not, their models, their event streams
prompts        request body -> token ids
tokenizer, chat_template, chat_messages, content_format
               text -> token ids, as the engine does it
health         what /health says
replies        errors in OpenAI's form
metrics        Prometheus
"""
