"""Runs ``shardlab`` as ``python -m shardlab``."""

import os
import sys

from ._binary import BinaryNotFound, find

if __name__ == "__main__":
    try:
        program = find()
    except BinaryNotFound as error:
        sys.exit(f"error: {error}")
    os.execv(program, [program, *sys.argv[1:]])
