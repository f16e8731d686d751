"""``python -m spheroid_node``: the same as the ``spheroid-node`` command."""

from spheroid_node.cli.main import main

if __name__ == "__main__":
    main()
