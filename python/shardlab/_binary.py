"""Finds the ``shardlab`` binary."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Iterator

VARIABLE = "SHARDLAB_BIN"


class BinaryNotFound(FileNotFoundError):
    """The ``shardlab`` binary was not found."""


def find() -> str:
    """Returns the path of the binary.

    Searches for the program that ``SHARDLAB_BIN`` names, then for the binary that was installed
    with this module, then on the ``PATH``. Raises ``BinaryNotFound`` if there is none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise BinaryNotFound(f"{VARIABLE}={named} is not a program")
        return found
    for folder in _installed():
        # `which` ignores a folder of the same name.
        found = shutil.which("shardlab", path=folder)
        if found is not None:
            return found
    found = shutil.which("shardlab")
    if found is None:
        raise BinaryNotFound(
            "the shardlab binary is neither next to this module nor on the PATH; "
            f"install the wheel, or name the binary in {VARIABLE}"
        )
    return found


def _installed() -> Iterator[str]:
    """Yields the folders where an installer puts this package's binary."""
    yield sysconfig.get_path("scripts")
    # `pip install --user`
    if sys.version_info >= (3, 10):
        scheme = sysconfig.get_preferred_scheme("user")
    else:
        scheme = "posix_user"
    yield sysconfig.get_path("scripts", scheme=scheme)
    # `pip install --target`
    yield str(Path(__file__).resolve().parent.parent / "bin")
