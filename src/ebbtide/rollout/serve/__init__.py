"""An OpenAI-compatible HTTP server over the paged engine, either by itself (`ebbtide serve`) or during training
(`rollout.serve_port`).

One thread owns the engine and does all torch work; another runs the event loop of the HTTP server. They communicate
through the RequestQueue of queue.py.
"""
