"""Hop server, chain client, sessions with key/value caches, decoders."""
