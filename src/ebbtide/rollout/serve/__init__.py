"""An OpenAI-compatible HTTP server over the paged engine: alone (`ebbtide serve`), or beside training (`rollout.serve_port`).

One thread owns the engine and does all of torch's work; another one runs the event loop of the HTTP server. They meet in desk.py.
"""
