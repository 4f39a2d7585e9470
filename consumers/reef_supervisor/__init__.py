"""Starts, watches and rebuilds the components of one deployment."""
