"""One SGLang server over HTTP, for calls that block: control, weights, sums.

Knows: the address, the key, how an error is said. Must not know: why anything is called; bodies come from requests.py.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Any, TypeVar

import msgspec

from reef_bus.errors import TransferError, Unavailable

T = TypeVar("T")

CALL_S = 60.0
"""For one control call: those that move or read weights bring their own."""

_direct = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.UnknownHandler,
):
    _direct.add_handler(_handler())
"""Nobody else is given the key, or answers in the server's place: a proxy that the environment names would be asked for
127.0.0.1, and a redirect would be followed."""


class Client:
    """Calls may come from any thread."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def get(self, route: str, timeout_s: float = CALL_S) -> Any:
        return self._call(urllib.request.Request(f"{self.url}/{route}", headers=self.headers), timeout_s)

    def post(self, route: str, body: dict[str, Any], timeout_s: float = CALL_S) -> Any:
        """The answer's JSON, None if it is empty. Raises TransferError("refused") with the server's words where it says
        no, and Unavailable where it says nothing: whether it did as it was asked is then unknown."""
        data = msgspec.json.encode(body)
        return self._call(urllib.request.Request(f"{self.url}/{route}", data, self.headers, method="POST"), timeout_s)

    def _call(self, request: urllib.request.Request, timeout_s: float) -> Any:
        try:
            with _direct.open(request, timeout=timeout_s) as reply:
                return _json(reply.read())
        except urllib.error.HTTPError as error:
            said = _body(error)
            raise TransferError("refused", f"{request.selector}: {error.code} {words(said)}") from error
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise Unavailable(f"the server at {self.url} gave no answer to {request.selector}: {error!r}") from error


def _body(error: urllib.error.HTTPError) -> str:
    try:
        return error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""


def _json(body: bytes) -> Any:
    if not body or body.lstrip()[:1] not in (b"{", b"[", b"n"):
        return None  # some routes answer in prose
    return msgspec.json.decode(body)


def shaped(route: str, said: Any, kind: type[T]) -> T:
    """What was said there. Raises TransferError("protocol") for anything else, as from whatever may stand between us
    and a server that is borrowed."""
    try:
        return msgspec.convert(said, kind)
    except msgspec.ValidationError as error:
        raise TransferError("protocol", f"/{route}: the answer is not SGLang's: {error}") from error


def words(body: str) -> str:
    """What an error's body says, in whichever of the server's forms."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.strip()[:500] or "without a word"
    for key in ("error", "message", "error_message", "detail"):
        if isinstance(found, dict) and found.get(key):
            said = found[key]
            return str(said.get("message", said) if isinstance(said, dict) else said)[:500]
    return body.strip()[:500]
