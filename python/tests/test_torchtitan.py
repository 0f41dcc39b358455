"""Tests the export of torchtitan configurations with replacements for its classes."""

import contextlib
import enum
import io
import json
import os
import sys
import tempfile
import textwrap
import types
import unittest
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, List, Optional
from unittest import mock

import shardlab
from shardlab.torchtitan import export, main


class BFloat16:
    """Has the same text as torch.bfloat16."""

    def __str__(self):
        return "torch.bfloat16"


class Load(enum.Enum):
    HEADTAIL = "headtail"


@dataclass
class Training:
    local_batch_size: int = 1
    global_batch_size: int = -1
    seq_len: int = 8192
    max_norm: float = 1.0
    steps: int = 1000
    dtype: str = "float32"
    mixed_precision_param: Any = field(default_factory=BFloat16)
    mixed_precision_reduce: str = "float32"


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    fsdp_reshard_after_forward: str = "default"
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1
    context_parallel_load_balancer: Load = Load.HEADTAIL


class FullAC:
    @dataclass
    class Config:
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False


class SelectiveAC:
    @dataclass
    class Config(FullAC.Config):
        force_recompute_mm_shapes_by_fqns: List[str] = field(default_factory=lambda: ["gate"])


@dataclass
class OldAC:
    mode: str = "full"


class Llama3:
    @dataclass
    class Config:
        layers: List[int] = field(default_factory=lambda: list(range(32)))


class DeepEPTokenDispatcher:
    @dataclass
    class Config:
        num_experts: int = 128


@dataclass
class Experts:
    token_dispatcher: Any = field(default_factory=DeepEPTokenDispatcher.Config)


class Qwen3:
    @dataclass
    class Config:
        layers: List[Any] = field(default_factory=lambda: [1, Experts()])


def parallelize():
    """Represents a function of a model."""


@dataclass
class ModelSpec:
    name: str = "llama3"
    flavor: str = "8B"
    model: Llama3.Config = field(default_factory=Llama3.Config)
    parallelize_fn: Callable[[], None] = parallelize


@dataclass
class Optimizer:
    name: str = "AdamW"
    lr: float = 3e-4


@dataclass
class Compile:
    enable: bool = True
    components: List[str] = field(default_factory=lambda: ["model", "loss"])


class Trainer:
    @dataclass
    class Config:
        model_spec: ModelSpec = field(default_factory=ModelSpec)
        hf_assets_path: Path = Path("assets/hf/Llama-3.1-8B")
        training: Training = field(default_factory=Training)
        parallelism: Parallelism = field(default_factory=Parallelism)
        activation_checkpoint: Optional[Any] = field(default_factory=SelectiveAC.Config)
        optimizer: Optimizer = field(default_factory=Optimizer)
        compile: Compile = field(default_factory=Compile)
        _owner: str = "Trainer"


def write(folder, config):
    path = Path(folder, "job.json")
    path.write_text(json.dumps(export(config)))
    return path


class Export(unittest.TestCase):
    def test_values_are_plain(self):
        exported = export(Trainer.Config())
        self.assertEqual(exported["training"]["mixed_precision_param"], "bfloat16")
        self.assertEqual(exported["parallelism"]["context_parallel_load_balancer"], "headtail")
        self.assertEqual(exported["hf_assets_path"], "assets/hf/Llama-3.1-8B")
        self.assertEqual(exported["model_spec"]["model"], "Llama3")
        self.assertEqual(exported["model_spec"]["parallelize_fn"], "parallelize")
        self.assertNotIn("_owner", exported)
        self.assertEqual(json.loads(json.dumps(exported)), exported)

    def test_the_class_says_what_is_recomputed(self):
        def mode(chosen):
            exported = export(Trainer.Config(activation_checkpoint=chosen))
            return exported["activation_checkpoint"]["mode"]

        self.assertEqual(mode(SelectiveAC.Config()), "selective")
        self.assertEqual(mode(FullAC.Config()), "full")
        self.assertEqual(mode(OldAC()), "full")
        self.assertEqual(mode(None), "none")

    def test_the_dispatcher_of_experts_is_exported(self):
        key = "expert_parallel_comm_backend"
        self.assertNotIn(key, export(Trainer.Config())["parallelism"])
        spec = ModelSpec(name="qwen3", flavor="30B-A3B", model=Qwen3.Config())
        exported = export(Trainer.Config(model_spec=spec))
        self.assertEqual(exported["parallelism"][key], "deepep")
        self.assertEqual(exported["model_spec"]["model"], "Qwen3")

    def test_anything_else_is_an_error(self):
        for wrong in ({}, Trainer.Config, 3):
            with self.assertRaisesRegex(TypeError, "expected a Trainer.Config"):
                export(wrong)


class Fit(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def fit(self, config):
        return shardlab.fit(write(self.folder, config), gpus="8xh100")

    def test_fit_reads_every_key(self):
        found = self.fit(Trainer.Config())
        self.assertEqual((found["framework"], found["fits"]), ("torchtitan", "yes"))
        scenario = found["scenario"]
        for line in ['preset = "llama3-8b"', "seq_len = 8192", 'recompute = "selective"']:
            self.assertIn(line, scenario)
        keys = {key["key"] for key in found["keys"] if key["file"]}

        def leaves(item, path=""):
            for name, each in item.items():
                if isinstance(each, dict):
                    yield from leaves(each, f"{path}{name}.")
                else:
                    yield path + name

        # A key without a counterpart may represent the keys below it.
        for leaf in leaves(export(Trainer.Config())):
            parts = leaf.split(".")
            above = {".".join(parts[: n + 1]) for n in range(len(parts))}
            self.assertTrue(above & keys, leaf)

    def test_recompute_is_that_of_the_class(self):
        for chosen, expected in [(FullAC.Config(), "full"), (None, "none")]:
            scenario = self.fit(Trainer.Config(activation_checkpoint=chosen))["scenario"]
            self.assertIn(f'recompute = "{expected}"', scenario)


class CommandLine(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(folder.name)
        Path("jobs.py").write_text(
            textwrap.dedent(
                """
                from dataclasses import dataclass, field

                @dataclass
                class Training:
                    seq_len: int = 4096

                @dataclass
                class Config:
                    training: Training = field(default_factory=Training)

                def job():
                    return Config()

                NUMBER = 3
                """
            )
        )
        self.addCleanup(sys.modules.pop, "jobs", None)
        self.addCleanup(sys.path.__setitem__, slice(None), list(sys.path))

    def run_main(self, *arguments):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(list(arguments))
        return status, out.getvalue(), err.getvalue()

    def test_a_function_is_exported(self):
        status, out, _ = self.run_main("jobs:job")
        self.assertEqual((status, json.loads(out)), (0, {"training": {"seq_len": 4096}}))
        status, out, _ = self.run_main("jobs:job", "-o", "job.json")
        self.assertEqual((status, out), (0, ""))
        self.assertEqual(json.loads(Path("job.json").read_text())["training"], {"seq_len": 4096})

    def test_wrong_names_are_bad_input(self):
        for name, message in [
            ("jobs:jbo", "jobs has no function jbo"),
            ("jobs:NUMBER", "jobs has no function NUMBER"),
            ("jobs", "expected MODULE:FUNCTION"),
            ("nowhere:job", "No module named 'nowhere'"),
        ]:
            status, _, err = self.run_main(name)
            self.assertEqual(status, 2)
            self.assertIn(message, err)

    def test_torchtitan_parses_its_own_options(self):
        seen = []

        class ConfigManager:
            def parse_args(self, arguments):
                seen.extend(arguments)
                return Trainer.Config()

        modules = {
            "torchtitan": types.ModuleType("torchtitan"),
            "torchtitan.config": types.ModuleType("torchtitan.config"),
        }
        modules["torchtitan.config"].ConfigManager = ConfigManager
        given = ["--module", "llama3", "--config", "llama3_8b", "--training.steps", "5"]
        with mock.patch.dict(sys.modules, modules):
            status, out, _ = self.run_main(*given, "-o", "titan.json")
        self.assertEqual((status, out, seen), (0, "", given))
        self.assertEqual(json.loads(Path("titan.json").read_text())["model_spec"]["name"], "llama3")
        with mock.patch.dict(sys.modules, {"torchtitan": None, "torchtitan.config": None}):
            status, _, err = self.run_main(*given)
        self.assertEqual(status, 2)
        self.assertIn("need torchtitan", err)


if __name__ == "__main__":
    unittest.main()
