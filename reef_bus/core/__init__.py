"""The pure core: what a deployment's log means and who owes what. No clock, no randomness, no IO, no framework."""
