"""The server of remote execution: a gateway over HTTP, and an engine for each model.

:func:`~.app.create_app` makes an ASGI application of a :class:`~.gateway.Gateway`; :func:`~.serve.serve` runs it, as ``nnsight serve``
does. Needs the extra ``nnsight[server]``.
"""
