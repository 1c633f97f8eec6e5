"""Requests in progress: the loop that drives the native engine, for one thread or for asyncio."""
