"""Runtime load ids and the other names that are derived, never drawn.

Knows: how ids are spelled. Must not know: randomness; what must be random arrives as data.
"""

from __future__ import annotations

import base64
import hashlib
import re

import msgspec

from reef_bus.errors import ContractError, ReefError, Rejected

BASE = "base"
"""The candidate id of release 0, the model that a scenario was registered with."""

MAX_DIGITS = 4300  # Python reads no more
TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_ENCODED = "b64-"
_ADAPTER = "reef-adapter-"
MAX_NAME = 255  # of a folder, in bytes, on every file system that we know


class LoadId(msgspec.Struct, frozen=True, gc=False):
    """`<incarnation>:<sequence>`: names one load of one content, forever."""

    incarnation: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.sequence}"


def parse_load_id(text: str) -> LoadId:
    """Take a load id apart at its last colon; ContractError unless it is spelled canonically."""
    incarnation, _, digits = text.rpartition(":")
    if incarnation and len(digits) <= MAX_DIGITS and digits.isascii() and digits.isdecimal():
        found = LoadId(incarnation, int(digits))
        if str(found) == text:
            return found
    raise ContractError(f"load id {text!r} is not <incarnation>:<sequence>")


def derived(prefix: str, *parts: object) -> str:
    """An id that is the same whenever its parts are: `prefix-` and 16 hex digits."""
    text = "\n".join(str(part) for part in parts)
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


# -- one spelling where some characters may not stand


def token(text: str) -> str:
    """`text` as one subject token: itself where it can be, else base64url; lossless."""
    if TOKEN.fullmatch(text) and not text.startswith(_ENCODED):
        return text
    return _ENCODED + _base64url(text)


def plain(tok: str) -> str:
    """The inverse of `token`."""
    return _text(tok.removeprefix(_ENCODED)) if tok.startswith(_ENCODED) else tok


def _base64url(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _text(body: str) -> str:
    return base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)).decode()


# -- adapters


def adapter_base(scenario: str) -> str:
    """The candidate id of the adapter that a scenario was registered with."""
    return derived(BASE, scenario)


def adapter_name(scenario: str, load_id: str) -> str:
    """`reef-adapter-<base64url of the scenario>.<incarnation>.<sequence>`: what an engine knows this load of an adapter
    by, and how its folder is called. Lossless; stands in a URL and in `model:adapter` as it is.

    ContractError for what is no load id; Rejected where no folder could be called so.
    """
    found = parse_load_id(load_id)
    name = f"{_ADAPTER}{_base64url(scenario)}.{token(found.incarnation)}.{found.sequence}"
    if len(name) > MAX_NAME:
        raise Rejected(
            f"scenario {scenario!r} makes {len(name)} characters of an adapter's name, expected {MAX_NAME} at most"
        )
    return name


def parse_adapter_name(name: str) -> tuple[str, str]:
    """The scenario and the load id of an adapter's name; ContractError for every name that is not one."""
    parts = name.removeprefix(_ADAPTER).split(".")
    try:
        if len(parts) == 3 and len(name) <= MAX_NAME:
            scenario, load_id = _text(parts[0]), f"{plain(parts[1])}:{parts[2]}"
            if adapter_name(scenario, load_id) == name:
                return scenario, load_id
    except (ValueError, ReefError):  # not base64url, not UTF-8 within, no load id, or too long
        pass
    raise ContractError(f"adapter {name!r} is not {_ADAPTER}<base64url scenario>.<incarnation>.<sequence>")
