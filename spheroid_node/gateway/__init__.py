"""HTTP in front of a swarm: OpenAI-style API, swarm page, /metrics. Needs the extra ``gateway``."""
