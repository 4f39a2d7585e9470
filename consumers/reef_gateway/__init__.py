"""HTTP front door: answers requests, hands out receipts, records what was said."""
