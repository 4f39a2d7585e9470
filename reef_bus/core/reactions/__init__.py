"""Who owes what: (world, me, now) → debts. Start-up, recovery and normal running are this one question.

Knows: the world and the deadlines. Must not know: how an effect is performed, or how a fact is appended.
A debt's key is the sequence that made it owed (and the attempt): asked again, the same debt has the same key.
"""

from reef_bus.core.reactions.engine import engine
from reef_bus.core.reactions.publisher import publisher
from reef_bus.core.reactions.trainer import trainer

__all__ = ["trainer", "engine", "publisher"]
