"""Drives publications: decides from the log, appends, touches no weights."""
