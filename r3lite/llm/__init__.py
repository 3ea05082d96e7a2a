"""Clients of remote language models: requests, replies, their cache, rate limits and caps. Knows no judge."""
