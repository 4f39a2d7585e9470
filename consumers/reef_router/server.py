"""The process of SGLang's router: its settings come as JSON on stdin, where nobody else of the machine sees the key.

Knows: how sglang-router 0.3.2 is started from Python. Must not know: the log, or which workers it gets.
Its own launcher imports all of SGLang for a mode that we do not use; these two modules import nothing but the router.
"""

from __future__ import annotations

import sys

import msgspec


def main() -> None:
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    Router.from_args(RouterArgs(**msgspec.json.decode(sys.stdin.buffer.read()))).start()


if __name__ == "__main__":
    main()
