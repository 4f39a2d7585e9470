"""The `record` family: answers and reports, on a stream of their own.

Knows: what gateways and harnesses may say. Must not know: who reacts to it.
"""

from __future__ import annotations

from typing import Any

from reef_bus.events.shapes import Blob, Event, Span


class RecordEvent(Event, frozen=True, kw_only=True):
    """Written by gateways and harnesses; told apart by its id, never compared."""

    family = "record"
    id_field = "scenario"
    own_chain = True
    scenario: str


class InferenceRecorded(RecordEvent, frozen=True, kw_only=True):
    """One served answer. Token ids and logprobs are row `row` of `blob`.

    `load_id` produced every token. `as_of` and `done_as_of` are the LOG sequences that the engine had folded when it
    began and ended the generation, so that anyone can evaluate the serving rule again at that very point. Where pauses
    in place interrupted it, `spans` say the same of each part, all tokens in order, and `load_id` is the first one's.
    """

    record: str
    engine: str
    boot: str
    load_id: str
    as_of: int
    done_as_of: int
    prompt: str
    answer: str
    prompt_tokens: int
    answer_tokens: int
    temperature: float
    blob: Blob
    row: int
    tags: dict[str, str]
    spans: tuple[Span, ...] = ()


class ReportReceived(RecordEvent, frozen=True, kw_only=True):
    """Feedback on one or more records. The report's id repeats with the same content only."""

    report: str
    references: tuple[str, ...]
    score: float
    feedback: str
    metadata: dict[str, Any]
