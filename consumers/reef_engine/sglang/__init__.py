"""An unmodified SGLang server as an engine: its requests, its process, and what it needs where there is no GPU."""
