"""reef-bus: an event-sourced pipeline that decides when a trainer's weights may begin to serve.

Importing this package needs msgspec and nats-py only; everything heavier is imported by what uses it.
"""

__version__ = "0.1.0"
