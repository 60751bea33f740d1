"""The server of remote execution: a gateway over HTTP, and an engine for each model.

:func:`~.app.create_app` returns the ASGI application of a :class:`~.gateway.Gateway`. :func:`~.serve.serve` runs it; ``nnsight serve``
calls this function. Needs the extra ``nnsight[server]``.
"""
