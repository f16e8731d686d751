"""A whole swarm in one process and in virtual time, on the code of rounds/ and training/ that nodes run."""
