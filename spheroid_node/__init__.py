"""Train and serve one language model together, a block a machine."""
