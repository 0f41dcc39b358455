"""Predicts, checks and runs fully sharded (FSDP) training steps.

Every function runs the ``shardlab`` binary and returns the JSON that it prints, as dictionaries.
``docs/reference/json.md`` describes their keys.

A scenario is a file, the name of a shipped scenario, or a dictionary with the sections of a file::

    import shardlab

    job = {
        "model": {"preset": "llama3-8b"},
        "train": {"seq_len": 8192, "recompute": "full"},
        "mesh": {"hardware": "h200-nvlink", "dp_shard": 4},
    }
    shardlab.predict(job)["step_ms"]["median"]
    shardlab.predict(job, set={"fsdp.prefetch_forward": 0})["exposed_ms"]["total"]

Options of the command line that a function does not name can be given by name, with underscores for
dashes: ``shardlab.predict(job, full_ranks=True, scale={"host": 2})`` is
``shardlab sim --full-ranks --scale host=2``.

Runs are not saved unless ``store`` names a folder. Paths in a dictionary are relative to the
working directory. A failed command raises :class:`Error`; a dictionary that cannot be a scenario,
for example because it contains ``None``, raises ``TypeError`` or ``ValueError``.
"""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

from . import _toml
from ._binary import BinaryNotFound
from ._binary import find as binary
from ._call import Error, FilePath, Option, Overrides, Scenario
from ._call import objects as _objects
from ._call import on_scenarios as _on_scenarios
from ._call import options as _options
from ._call import settings as _settings
from ._call import text as _text

__all__ = [
    "BinaryNotFound",
    "Error",
    "FilePath",
    "Option",
    "Overrides",
    "Scenario",
    "binary",
    "check",
    "compare",
    "dumps",
    "explain",
    "fit",
    "gate",
    "plan",
    "predict",
    "run",
    "scenarios",
    "schema",
    "sweep",
    "tune",
    "version",
]

try:
    __version__ = metadata.version("shardlab")
except metadata.PackageNotFoundError:  # Imported from a checkout.
    __version__ = "0+unknown"


def predict(
    scenario: Scenario,
    *,
    set: Optional[Overrides] = None,
    store: Optional[FilePath] = None,
    **options: Option,
) -> Dict[str, Any]:
    """Predicts step time, overlap and memory, as ``shardlab sim`` does.

    ``set`` overrides keys of the scenario. ``store`` is the folder to save the run in.
    """
    flags = [*_settings("--set", set), *_options(options)]
    return _on_scenarios("sim", [scenario], flags, store)[0]


def sweep(
    scenario: Scenario,
    axes: Optional[Union[Mapping[str, Sequence[Any]], Sequence[str]]] = None,
    *,
    set: Optional[Overrides] = None,
    store: Optional[FilePath] = None,
    **options: Option,
) -> List[Dict[str, Any]]:
    """Predicts all combinations of some options and returns one dictionary per point.

    ``axes`` maps keys to their values: ``{"train.micro_batch": [1, 2, 4]}``. Keys joined by commas
    change together: ``{"mesh.dp_shard,mesh.dp_replicate": [[16, 1], [8, 2]]}``. The ``[sweep]``
    section of a scenario adds axes.
    """
    flags = [*_settings("--axis", axes), *_settings("--set", set), *_options(options)]
    return _on_scenarios("sweep", [scenario], flags, store)


def fit(
    *jobs: Scenario,
    gpus: Optional[str] = None,
    set: Optional[Overrides] = None,
    **options: Option,
) -> Dict[str, Any]:
    """Predicts whether a job fits into memory, from the configuration of a framework or a scenario.

    ``gpus`` names the GPUs, such as ``"8xh100"``. If a job has several files, pass all of them. A
    job that does not fit is not an error: see ``fits`` of the result.
    """
    if not jobs:
        raise TypeError("fit() needs at least one job")
    flags = [*_settings("--set", set), *_options({"gpus": gpus, **options})]
    return _on_scenarios("fit", jobs, flags)[0]


def tune(
    *jobs: Scenario,
    gpus: Optional[str] = None,
    set: Optional[Overrides] = None,
    keep: Optional[Overrides] = None,
    only: Optional[Sequence[str]] = None,
    free: Optional[Overrides] = None,
    **options: Option,
) -> Dict[str, Any]:
    """Finds the best settings of a job: the shortest step within the memory of its GPUs.

    ``keep`` fixes keys, ``only`` names the keys that may change, and ``free`` adds keys to the
    search. Other options are those of the command line: ``budget="70GiB"``, ``goal="memory"``,
    ``longest_sequence=True``. If nothing fits, this is not an error: see ``found`` of the result.
    """
    if not jobs:
        raise TypeError("tune() needs at least one job")
    flags = [
        *_settings("--set", set),
        *_settings("--keep", keep),
        *_options({"only": only}),
        *_settings("--free", free),
        *_options({"gpus": gpus, **options}),
    ]
    return _on_scenarios("tune", jobs, flags)[0]


def explain(
    scenario: Scenario,
    *,
    set: Optional[Overrides] = None,
    what_if: bool = True,
    **options: Option,
) -> Dict[str, Any]:
    """Explains the time and memory of a step, and what other options would change.

    ``what_if=False`` skips the other options, which take most of the time.
    """
    flags = [*_settings("--set", set), *_options({"no_what_if": not what_if, **options})]
    return _on_scenarios("explain", [scenario], flags)[0]


def check(
    scenario: Scenario, *, set: Optional[Overrides] = None, **options: Option
) -> Dict[str, Any]:
    """Checks that a program is free of races, leaks and mismatched collectives.

    A broken rule is not an error: see ``ok`` and ``violations`` of the result.
    """
    flags = [*_settings("--set", set), *_options(options)]
    return _on_scenarios("check", [scenario], flags)[0]


def plan(
    scenario: Scenario, *, set: Optional[Overrides] = None, **options: Option
) -> Dict[str, Any]:
    """Returns the program of a scenario: the instructions of a step and the rules behind them."""
    flags = [*_settings("--set", set), *_options(options)]
    return _on_scenarios("plan", [scenario], flags)[0]


def compare(
    *runs: Scenario,
    set: Optional[Overrides] = None,
    set_a: Optional[Overrides] = None,
    set_b: Optional[Overrides] = None,
    **options: Option,
) -> Dict[str, Any]:
    """Compares scenarios, saved runs or baselines, and explains the difference.

    To compare a scenario with itself under other options, use ``set_a``, which only overrides keys
    of the first run, and ``set_b`` for the second.
    """
    if not runs:
        raise TypeError("compare() needs at least one run")
    flags = [
        *_settings("--set", set),
        *_settings("--set-a", set_a),
        *_settings("--set-b", set_b),
        *_options(options),
    ]
    return _on_scenarios("compare", runs, flags)[0]


def gate(
    *scenarios: FilePath,
    baseline: FilePath,
    set: Optional[Overrides] = None,
    **options: Option,
) -> List[Dict[str, Any]]:
    """Compares scenarios with their baselines and returns one dictionary per scenario.

    A regression is not an error: see ``pass`` and ``findings`` of each result. A missing baseline
    is an error; ``bless=True`` writes baselines instead of comparing. Baselines are found by the
    file name of their scenario, so dictionaries are not accepted; :func:`dumps` converts one to a
    file's text.
    """
    if not scenarios:
        raise TypeError("gate() needs at least one scenario")
    flags = [*_settings("--set", set), *_options({"baseline": baseline, **options})]
    return _on_scenarios("gate", scenarios, flags)


def run(verb: str, *arguments: FilePath, store: Optional[FilePath] = None) -> List[Dict[str, Any]]:
    """Runs any command that has ``--json`` and returns the objects that it prints.

    ``shardlab.run("exec", "llama-tiny", "--steps", "5")`` trains. Arguments are those of the
    command line. ``store`` is the folder of saved runs.
    """
    given = [verb, *map(str, arguments)]
    if store is not None:
        given[1:1] = ["--store", str(store)]
    return _objects(given, store)


def scenarios() -> List[Dict[str, Any]]:
    """Returns the shipped scenarios."""
    return _objects(["scenarios"])


def schema() -> Dict[str, Any]:
    """Returns the JSON Schema of scenarios."""
    found: Dict[str, Any] = json.loads(_text(["schema"]))
    return found


def version() -> str:
    """Returns the version of the binary."""
    return _text(["--version"]).split()[-1]


def dumps(scenario: Mapping[str, Any]) -> str:
    """Converts a dictionary to the text of a scenario file."""
    return _toml.dumps(scenario)
