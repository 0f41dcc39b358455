"""Writes dictionaries as TOML, which the standard library can only read."""

from __future__ import annotations

import math
import os
import re
from numbers import Integral, Real
from typing import Any, Mapping, Tuple

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
}
_INTEGERS = range(-(2**63), 2**63)

_Path = Tuple[str, ...]


def dumps(document: Mapping[str, Any]) -> str:
    """Returns the TOML text of a document, with one line per key of each section.

    Raises ``TypeError`` for types that TOML does not have, such as ``None``, and ``ValueError`` for
    values that it cannot represent. The message names the key.
    """
    if not isinstance(document, Mapping):
        raise TypeError(f"a mapping is expected, not {type(document).__name__}")
    values = [(key, value) for key, value in document.items() if not isinstance(value, Mapping)]
    sections = [(key, value) for key, value in document.items() if isinstance(value, Mapping)]
    # Keys after a section's header would belong to that section.
    lines = [_line(key, value, ()) for key, value in values]
    for name, section in sections:
        lines.append(f"[{_key(name, ())}]")
        lines.extend(_line(key, value, (name,)) for key, value in section.items())
    return "".join(f"{line}\n" for line in lines)


def value(item: Any, path: _Path = ()) -> str:
    """Returns the TOML text of a value. ``path`` is its name in errors."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, str):
        return _string(item, path)
    if isinstance(item, os.PathLike):
        return _string(os.fsdecode(item), path)
    if isinstance(item, Integral):
        return _integer(int(item), path)
    if isinstance(item, Real):
        return _float(float(item))
    if isinstance(item, (list, tuple)):
        items = (value(each, (*path, str(index))) for index, each in enumerate(item))
        return f"[{', '.join(items)}]"
    if isinstance(item, Mapping):
        pairs = (_line(key, each, path) for key, each in item.items())
        return f"{{ {', '.join(pairs)} }}" if item else "{}"
    if item is None:
        raise TypeError(f"{_shown(path)} is None: leave the key out to get its default")
    raise TypeError(f"{_shown(path)} is a {type(item).__name__}, which TOML has no type for")


def _line(key: Any, item: Any, parents: _Path) -> str:
    return f"{_key(key, parents)} = {value(item, (*parents, str(key)))}"


def _key(key: Any, parents: _Path) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{_shown((*parents, repr(key)))}: keys must be strings")
    return key if _BARE_KEY.fullmatch(key) else _string(key, (*parents, key))


def _string(text: str, path: _Path) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_shown(path)} is not valid Unicode: {text!r}") from None
    return f'"{"".join(map(_character, text))}"'


def _character(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character < " " or character == "\x7f":
        return f"\\u{ord(character):04X}"
    return character


def _integer(number: int, path: _Path) -> str:
    if number not in _INTEGERS:
        raise ValueError(f"{_shown(path)} = {number} does not fit into 64 bits")
    return str(number)


def _float(number: float) -> str:
    if math.isnan(number):
        return "nan"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    # The shortest text that parses to the same number; it always has a point or an exponent.
    return repr(number)


def _shown(path: _Path) -> str:
    return ".".join(path) or "the value"
