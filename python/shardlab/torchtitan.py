"""Writes a torchtitan configuration as JSON, which ``shardlab fit`` and ``tune`` read.

torchtitan's configurations are Python functions that return a ``Trainer.Config``::

    python -m shardlab.torchtitan --module llama3 --config llama3_8b -o job.json
    shardlab fit job.json --gpus 8xh100

Overrides follow as for a training run, and torchtitan parses them:
``--training.local_batch_size 2``. For a function of another module, pass ``MODULE:FUNCTION``; the
function must not need arguments, and there are no overrides. From Python, :func:`export` returns
the same configuration as a dictionary.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import json
import os
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence

__all__ = ["export", "main"]

#: Modes of activation checkpointing by the class that implements them.
_RECOMPUTE = {
    "FullAC": "full",
    "SelectiveAC": "selective",
    "RegionAC": "selective",
    "MemoryBudgetAC": "memory_budget",
}

#: Backends of expert parallelism by the class of the token dispatcher.
_DISPATCHERS = {
    "AllToAllTokenDispatcher": "standard",
    "DeepEPTokenDispatcher": "deepep",
    "HybridEPTokenDispatcher": "hybridep",
    "MinimalAsyncEPTokenDispatcher": "minimal_async_ep",
}


def export(config: Any) -> Dict[str, Any]:
    """Returns a configuration as a dictionary of JSON values.

    ``config`` is a ``Trainer.Config``, or another dataclass with the same sections. Fields that
    start with an underscore are omitted, as in torchtitan's ``to_dict``. Functions and classes
    become their names. The layers of the model are omitted, because its name and flavor determine
    them; the token dispatcher of its experts becomes ``expert_parallel_comm_backend``, as in older
    versions.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"expected a Trainer.Config, not {type(config).__name__}")
    exported = _fields(config)
    spec = getattr(config, "model_spec", None)
    if dataclasses.is_dataclass(spec) and dataclasses.is_dataclass(getattr(spec, "model", None)):
        exported["model_spec"]["model"] = _owner(spec.model)
        dispatcher = _dispatcher(spec.model)
        if dispatcher is not None:
            parallelism = exported.setdefault("parallelism", {})
            parallelism.setdefault("expert_parallel_comm_backend", dispatcher)
    if "activation_checkpoint" in exported:
        chosen = config.activation_checkpoint
        if chosen is None:
            exported["activation_checkpoint"] = {"mode": "none"}
        elif not hasattr(chosen, "mode"):
            # The class replaces the field of older versions.
            name = _owner(chosen)
            mode = _RECOMPUTE.get(name, name)
            exported["activation_checkpoint"] = {"mode": mode, **_fields(chosen)}
    return exported


def _fields(config: Any) -> Dict[str, Any]:
    names = (field.name for field in dataclasses.fields(config))
    return {name: _plain(getattr(config, name)) for name in names if not name.startswith("_")}


def _plain(item: Any) -> Any:
    """Converts a value to one that JSON has."""
    if isinstance(item, enum.Enum):
        return _plain(item.value)
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return _fields(item)
    if isinstance(item, Mapping):
        return {str(key): _plain(each) for key, each in item.items()}
    if isinstance(item, (list, tuple)):
        return [_plain(each) for each in item]
    if isinstance(item, (set, frozenset)):
        return sorted((_plain(each) for each in item), key=str)
    if isinstance(item, os.PathLike):
        return os.fsdecode(item)
    if callable(item):
        return getattr(item, "__qualname__", None) or repr(item)
    # For example torch.bfloat16.
    text = str(item)
    return text[len("torch.") :] if text.startswith("torch.") else text


def _dispatcher(item: Any) -> Optional[str]:
    """Returns the backend of the first token dispatcher in a configuration."""
    if isinstance(item, (list, tuple)):
        inner = list(item)
    elif isinstance(item, Mapping):
        inner = list(item.values())
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        found = _DISPATCHERS.get(_owner(item))
        if found is not None:
            return found
        inner = [getattr(item, field.name) for field in dataclasses.fields(item)]
    else:
        return None
    return next((found for found in map(_dispatcher, inner) if found is not None), None)


def _owner(config: Any) -> str:
    """Returns the class that contains a configuration: ``FullAC`` for ``FullAC.Config``."""
    names = type(config).__qualname__.split(".")
    return names[-2] if names[-1] == "Config" and len(names) > 1 else names[-1]


def _of_function(name: str) -> Any:
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{name}: expected MODULE:FUNCTION, such as my_job.configs:llama3_8b")
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ValueError(f"{name}: {module} has no function {function}")
    return found()


def _of_registry(arguments: Sequence[str]) -> Any:
    try:
        config = importlib.import_module("torchtitan.config")
    except ImportError as error:
        raise ValueError(
            f"--module and --config need torchtitan, which cannot be imported ({error}); "
            "MODULE:FUNCTION needs only that module"
        ) from error
    return config.ConfigManager().parse_args(list(arguments))


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the command with these arguments or those of the process. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shardlab.torchtitan",
        description="Write a torchtitan configuration as JSON, which `shardlab fit` reads.",
        epilog="Further options are torchtitan's: --module, --config, --section.key VALUE.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "function",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="function that returns the configuration",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write to this file")
    # Values of torchtitan's options must not be parsed as positional arguments of this command.
    given = sys.argv[1:] if arguments is None else arguments
    if not any(each.split("=")[0] in ("--module", "--config") for each in given):
        known, rest = parser.parse_args(given), []
    else:
        outer = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        outer.add_argument("-o", "--output")
        known, rest = outer.parse_known_args(given)
        known.function = None
    if not known.function and not rest:
        parser.error("expected MODULE:FUNCTION, or --module and --config")
    # Finds modules in the working directory, like `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        config = _of_function(known.function) if known.function else _of_registry(rest)
        text = json.dumps(export(config), indent=2) + "\n"
    except (ImportError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if known.output is None:
        sys.stdout.write(text)
    else:
        with open(known.output, "w", encoding="utf-8") as file:
            file.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
