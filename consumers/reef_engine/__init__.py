"""The agent beside one inference engine, and the backends that it can drive.

Knows: one engine, its memory and its own family of events. Must not know: the trainer.
"""
