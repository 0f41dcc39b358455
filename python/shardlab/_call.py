"""Runs the binary and parses its JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Union

from . import _binary, _toml

#: A scenario: a file, the name of a shipped scenario, or its sections as a dictionary.
Scenario = Union[str, "os.PathLike[str]", Mapping[str, Any]]

#: A file or folder.
FilePath = Union[str, "os.PathLike[str]"]

#: Overrides: ``{"fsdp.prefetch_forward": 0}``, or the syntax of the command line,
#: ``["fsdp.prefetch_forward=0"]``.
Overrides = Union[Mapping[str, Any], Iterable[str]]

#: A command-line option. See :func:`options`.
Option = Union[None, bool, int, float, str, "os.PathLike[str]", Sequence[Any], Mapping[str, Any]]


class Error(Exception):
    """A command failed.

    ``exit_code`` is that of the binary: 2 for invalid input, 3 if the run itself failed, negative
    if a signal ended it. ``results`` holds the objects that were printed before the failure.
    """

    def __init__(
        self, message: str, exit_code: int, results: Sequence[Dict[str, Any]] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.results = list(results)

    def __reduce__(self) -> Any:
        # Worker processes pickle their errors.
        return type(self), (self.message, self.exit_code, self.results)


def text(arguments: Sequence[str], store: Optional[FilePath] = None) -> str:
    """Runs the binary and returns its standard output.

    Exit status 1, which means that a check failed, is not an error.
    """
    environment = dict(os.environ, NO_COLOR="1")
    if store is None:
        # Runs are saved only when the caller names a folder.
        environment["SHARDLAB_STORE"] = "off"
    if sys.prefix != sys.base_prefix:
        # The binary finds GPU libraries in this environment even if it is not activated.
        environment.setdefault("VIRTUAL_ENV", sys.prefix)
    done = subprocess.run(
        [_binary.find(), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=environment,
        check=False,
    )
    failed = done.returncode not in (0, 1) or (done.returncode == 1 and not done.stdout)
    if failed:
        raise Error(_message(done), done.returncode, _complete(done.stdout))
    for line in done.stderr.splitlines():
        if line.startswith("warning: "):
            warnings.warn(line[len("warning: ") :], stacklevel=5)
    return done.stdout


def objects(arguments: Sequence[str], store: Optional[FilePath] = None) -> List[Dict[str, Any]]:
    """Runs the binary with ``--json`` and returns the objects that it prints."""
    printed = text(_with_json(arguments), store)
    return [json.loads(line) for line in printed.splitlines()]


def on_scenarios(
    verb: str,
    scenarios: Sequence[Scenario],
    flags: Sequence[str],
    store: Optional[FilePath] = None,
) -> List[Dict[str, Any]]:
    """Runs a command on scenarios. Writes dictionaries to temporary files first."""
    if store is not None:
        flags = [*flags, f"--store={os.fspath(store)}"]
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(_as_argument(each)) for each in scenarios]
        try:
            return objects([verb, *flags, "--", *paths], store)
        except Error as error:
            # The caller does not know the paths of these temporary files.
            message = error.message
            for scenario, path in zip(scenarios, paths):
                if isinstance(scenario, Mapping):
                    message = message.replace(path, Path(path).name)
            raise Error(message, error.exit_code, error.results) from None


def options(given: Mapping[str, Option]) -> List[str]:
    """Returns options as arguments: ``full_ranks=True`` becomes ``--full-ranks``.

    ``None`` and ``False`` omit an option, a sequence repeats it, and a mapping repeats it with
    ``KEY=VALUE``.
    """
    arguments: List[str] = []
    for name, given_value in given.items():
        flag = "--" + name.strip("_").replace("_", "-")
        if given_value is None or given_value is False:
            continue
        if given_value is True:
            arguments.append(flag)
        elif isinstance(given_value, Mapping):
            arguments.extend(f"{flag}={key}={each}" for key, each in given_value.items())
        elif isinstance(given_value, (list, tuple)):
            arguments.extend(f"{flag}={_plain(each)}" for each in given_value)
        else:
            arguments.append(f"{flag}={_plain(given_value)}")
    return arguments


def settings(flag: str, given: Optional[Overrides]) -> List[str]:
    """Returns overrides or axes as arguments, with their values as TOML."""
    if given is None:
        return []
    if isinstance(given, str):
        return [f"{flag}={given}"]
    if isinstance(given, Mapping):
        return [f"{flag}={key}={_toml.value(each, (str(key),))}" for key, each in given.items()]
    return [f"{flag}={each}" for each in given]


@contextlib.contextmanager
def _as_argument(scenario: Scenario) -> Iterator[str]:
    if not isinstance(scenario, Mapping):
        yield os.fspath(scenario)
        return
    written = _toml.dumps(_absolute(scenario))
    with tempfile.TemporaryDirectory(prefix="shardlab-") as folder:
        path = Path(folder, "scenario.toml")
        path.write_text(written, encoding="utf-8")
        yield str(path)


def _absolute(item: Any) -> Any:
    """Returns a scenario with its relative paths made absolute.

    Paths in a file are relative to that file, but those in a dictionary are relative to the working
    directory.
    """
    if isinstance(item, Mapping):
        return {key: _absolute(each) for key, each in item.items()}
    if isinstance(item, (list, tuple)):
        return [_absolute(each) for each in item]
    if isinstance(item, os.PathLike):
        return os.path.abspath(os.fsdecode(item))
    if isinstance(item, str) and item.endswith((".toml", ".json")) and os.path.isfile(item):
        return os.path.abspath(item)
    return item


def _plain(given: Any) -> str:
    return os.fsdecode(given) if isinstance(given, os.PathLike) else str(given)


def _with_json(arguments: Sequence[str]) -> List[str]:
    """Adds ``--json`` before ``--``, where it is still an option."""
    listed = list(arguments)
    end = listed.index("--") if "--" in listed else len(listed)
    return [*listed[:end], "--json", *listed[end:]]


def _message(done: "subprocess.CompletedProcess[str]") -> str:
    said = done.stderr.strip()
    if said.startswith("error: "):
        said = said[len("error: ") :]
    if said:
        return said
    if done.returncode < 0:
        return f"shardlab was ended by signal {-done.returncode}"
    return f"shardlab failed with exit status {done.returncode}"


def _complete(printed: str) -> List[Dict[str, Any]]:
    """Returns the objects that were printed before a failure. The last line may be incomplete."""
    found: List[Dict[str, Any]] = []
    for line in printed.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
