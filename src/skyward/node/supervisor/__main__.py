"""``python -m skyward.node.supervisor FILE``: the program of a node's supervisor."""

from skyward.node.supervisor.supervisor import main

if __name__ == "__main__":
    main()
