"""Chat templates of Hugging Face's kind: jinja in a sandbox, with the few names that transformers gives them.

Knows: jinja2, and what a template may call. Must not know: tokens, messages, or where a template came from.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reef_bus.errors import Rejected


class Generation(Extension):
    """`{% generation %}` marks what an assistant has said; for a prompt that changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def compiled(text: str, where: str) -> Template:
    """Raises Rejected for what is no template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise Rejected(f"the chat template of {where} cannot be read: {error}") from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja2's own writes for HTML, and escapes what a model should read as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
