"""The trainer: batches in, candidates out, and the backends that it can drive.

Knows: one optimizer and its own family of events. Must not know: the engines.
"""
