"""The deployable roles, one package each.

Knows: which hands each role brings to the shared loop. Must not know: each other's internals.
"""
