"""kvplug: requests go to the worker that already holds their prefix in KV cache."""
