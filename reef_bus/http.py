"""How this project listens on HTTP: one small wrapper around aiohttp, imported only by roles that serve.

Knows: addresses and errors of listening. Must not know: any route.
"""

from __future__ import annotations

import contextlib

from aiohttp import web

from reef_bus.errors import Rejected


async def listen(app: web.Application, host: str, port: int, stack: contextlib.AsyncExitStack) -> str:
    """Serve `app` until the stack is closed; returns its URL. Raises Rejected when the port cannot be had.

    A handler is cancelled when its client goes away: an answer that nobody waits for keeps nobody else waiting."""
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=2.0, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, host, port, reuse_address=True)
    try:
        await site.start()
    except OSError as error:
        raise Rejected(
            f"cannot listen on {host}:{port}: {error.strerror}; free the port or configure another"
        ) from error
    return f"http://{host}:{runner.addresses[0][1]}"
