"""``python -m skyward.node.supervisor FOLDER``: the program of a node's supervisor."""

from skyward.node.supervisor.start import run_program

if __name__ == "__main__":
    run_program()
