"""Asyncio I/O: identity, DHT, TLS links and transfers."""
