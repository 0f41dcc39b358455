"""Tests the module with the binary that is installed with it."""

import contextlib
import io
import os
import pickle
import re
import stat
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from unittest import mock

import shardlab

#: A scenario that is not shipped and takes milliseconds to predict.
JOB = {
    "model": {
        "family": "llama",
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "ffn": 64,
        "vocab": 97,
        "max_seq_len": 16,
    },
    "train": {"seq_len": 16, "micro_batch": 2, "steps": 2},
    "mesh": {"hardware": "cpu", "dp_shard": 2},
}


class InFolder(unittest.TestCase):
    """Runs each test in an empty working directory."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(folder.name)
        self.folder = Path(folder.name)


class Verbs(InFolder):
    def test_predict_takes_dictionaries_files_and_names(self):
        Path("job.toml").write_text(shardlab.dumps(JOB))
        of_dictionary = shardlab.predict(JOB)
        self.assertEqual(of_dictionary["world_size"], 2)
        self.assertGreater(of_dictionary["step_ms"]["median"], 0)
        for same in ["job.toml", Path("job.toml")]:
            of_file = shardlab.predict(same)
            self.assertEqual(of_file["scenario"], "job")
            self.assertEqual(of_file["program_digest"], of_dictionary["program_digest"])
            self.assertEqual(of_file["step_ms"], of_dictionary["step_ms"])
        self.assertEqual(shardlab.predict("small-native")["scenario"], "small-native")

    def test_overrides_are_values_or_text(self):
        plain = shardlab.predict(JOB)["program_digest"]
        of_values = shardlab.predict(JOB, set={"train.micro_batch": 1, "fsdp.policy": "fsdp2"})
        of_text = shardlab.predict(JOB, set=["train.micro_batch=1", "fsdp.policy=fsdp2"])
        self.assertEqual(of_values["policy"], "fsdp2")
        self.assertEqual(of_values["program_digest"], of_text["program_digest"])
        self.assertNotEqual(of_values["program_digest"], plain)
        one = shardlab.predict(JOB, set="train.micro_batch=1")
        self.assertNotEqual(one["program_digest"], plain)

    def test_options_are_those_of_the_command_line(self):
        plain = shardlab.predict(JOB)["step_ms"]["median"]
        slower = shardlab.predict(JOB, slower={"arithmetic": 3, "memory": 3}, seed=None)
        self.assertGreater(slower["step_ms"]["median"], plain)
        straggler = shardlab.predict(JOB, straggler=["1=5"], full_ranks=True)
        self.assertGreater(straggler["step_ms"]["median"], plain)
        shardlab.predict(JOB, trace=Path("trace.json"))
        self.assertTrue(Path("trace.json").is_file())

    def test_sweep_returns_every_point(self):
        points = shardlab.sweep(
            JOB, {"train.micro_batch": [1, 2], "fsdp.policy": ["native", "fsdp2"]}
        )
        self.assertEqual(
            [point["settings"] for point in points],
            [
                {"train.micro_batch": batch, "fsdp.policy": policy}
                for batch in ["1", "2"]
                for policy in ["native", "fsdp2"]
            ],
        )
        together = shardlab.sweep(JOB, {"mesh.dp_shard,mesh.dp_replicate": [[4, 1], [2, 2]]})
        self.assertEqual([point["world_size"] for point in together], [4, 4])
        best = shardlab.sweep(JOB, ["train.micro_batch=[1, 2]"], top=1, sort="step")
        self.assertEqual([point["settings"] for point in best], [{"train.micro_batch": "1"}])
        of_scenario = shardlab.sweep({**JOB, "sweep": {"train.micro_batch": [1, 2, 3]}})
        self.assertEqual(len(of_scenario), 3)

    def test_fit_judges_configurations_and_scenarios(self):
        self.assertEqual(shardlab.fit(JOB)["fits"], "yes")
        Path("job.yaml").write_text(
            "base_model: Qwen/Qwen3-8B\nsequence_len: 8192\nmicro_batch_size: 2\n"
            "bf16: true\nfsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n"
        )
        answer = shardlab.fit("job.yaml", gpus="8xh100")
        self.assertEqual((answer["framework"], answer["fits"]), ("Axolotl", "no"))
        with self.assertRaises(shardlab.Error):
            shardlab.fit("job.yaml", gpus="8xh10")
        with self.assertRaises(TypeError):
            shardlab.fit()

    def test_tune_finds_settings_and_says_what_they_gain(self):
        only = ["train.recompute", "precision.reduce_dtype"]
        job = {**JOB, "train": {**JOB["train"], "recompute": "full"}}
        answer = shardlab.tune(job, gpus="2xh100", only=only)
        self.assertTrue(answer["found"] and answer["exact"])
        self.assertLessEqual(answer["best"]["step_ms"], answer["today"]["step_ms"])
        kept = shardlab.tune(job, gpus="2xh100", only=only, keep={"train.recompute": "full"})
        changed = [set for set in kept["best"]["set"] if "recompute=" in set]
        self.assertEqual(changed, ["train.recompute=\"full\""])
        none = shardlab.tune(job, gpus="2xh100", only=only, budget="1KiB")
        self.assertFalse(none["found"])

    def test_code_for_pytorch_is_python(self):
        flags = ["--emit", "python", "--set", "train.recompute=selective"]
        flags += ["--set", "fsdp.policy=fsdp2", "--set", "fsdp.prefetch_forward=2"]
        done = subprocess.run(
            [shardlab.binary(), "fit", "llama3-8b-8xh100", *flags],
            stdout=subprocess.PIPE,
            encoding="utf-8",
            check=True,
        )
        compile(done.stdout, "shard.py", "exec")
        self.assertIn("fully_shard(blocks[i]", done.stdout)

    def test_explain_tries_other_options_unless_told_not_to(self):
        self.assertTrue(shardlab.explain(JOB)["what_if"])
        self.assertFalse(shardlab.explain(JOB, what_if=False).get("what_if"))

    def test_check_and_plan_describe_one_program(self):
        checked = shardlab.check(JOB)
        planned = shardlab.plan(JOB, set={"train.micro_batch": 2})
        self.assertTrue(checked["ok"])
        self.assertEqual(checked["program_digest"], planned["program_digest"])
        self.assertGreater(checked["instructions"], 0)
        only = shardlab.plan(JOB, unit=["layers.0"])
        self.assertEqual({each["unit"] for each in only["instructions"]}, {"layers.0"})

    def test_compare_takes_several_dictionaries(self):
        other = {**JOB, "train": {**JOB["train"], "micro_batch": 1}}
        two = shardlab.compare(JOB, other)
        self.assertEqual([option["key"] for option in two["options"]], ["train.micro_batch"])
        self.assertEqual(two["options"][0]["values"], ["2", "1"])
        same = shardlab.compare(JOB, set_b={"train.micro_batch": 1})
        self.assertEqual(same["options"], two["options"])
        self.assertEqual(len(shardlab.compare(JOB, other, "small-native")["rows"]), 3)
        with self.assertRaises(TypeError):
            shardlab.compare()

    def test_gate_returns_regressions_and_raises_without_a_baseline(self):
        Path("job.toml").write_text(shardlab.dumps(JOB))
        with self.assertRaises(shardlab.Error) as caught:
            shardlab.gate("job.toml", baseline="baselines", no_exec=True)
        self.assertEqual(caught.exception.exit_code, 2)
        self.assertEqual([each["pass"] for each in caught.exception.results], [False])
        shardlab.gate("job.toml", baseline="baselines", no_exec=True, bless=True)
        self.assertTrue(Path("baselines/job.toml").is_file())
        (passed,) = shardlab.gate("job.toml", baseline="baselines", no_exec=True)
        self.assertTrue(passed["pass"])
        (failed,) = shardlab.gate(
            "job.toml",
            baseline="baselines",
            no_exec=True,
            preset="strict",
            set={"train.micro_batch": 1},
        )
        self.assertFalse(failed["pass"])
        with self.assertRaises(TypeError):
            shardlab.gate(baseline="baselines")

    def test_run_trains(self):
        Path("job.toml").write_text(shardlab.dumps(JOB))
        (trained,) = shardlab.run("exec", Path("job.toml"), "--steps", "2")
        self.assertEqual(len(trained["losses"]), 2)
        self.assertEqual(trained["program_digest"], shardlab.predict(JOB)["program_digest"])

    def test_scenarios_schema_and_version(self):
        self.assertIn("small-native", {each["name"] for each in shardlab.scenarios()})
        self.assertIn("mesh", shardlab.schema()["properties"])
        self.assertRegex(shardlab.version(), r"^\d+\.\d+\.\d+$")


class Documents(unittest.TestCase):
    root = Path(__file__).resolve().parents[2]

    def test_the_citation_names_this_version(self):
        citation = (self.root / "CITATION.cff").read_text(encoding="utf-8")
        self.assertIn(f"\nversion: {shardlab.version()}\n", citation)

    def test_the_example_of_the_install_page_runs(self):
        page = self.root / "docs" / "how-to" / "install.md"
        (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        printed = io.StringIO()
        names = {}
        with contextlib.redirect_stdout(printed):
            exec(example, names)
        self.assertIn(str(names["now"]["step_ms"]["median"]), printed.getvalue())
        self.assertEqual(len(names["points"]), 4)
        self.assertEqual(names["best"]["fits"], "yes")


class Files(InFolder):
    def test_runs_are_saved_only_where_asked(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("SHARDLAB_STORE", None)
            shardlab.predict(JOB)
            shardlab.compare(JOB, set_b={"train.micro_batch": 1})
            self.assertEqual(list(self.folder.iterdir()), [])
            saved = shardlab.predict(JOB, store="kept")
            self.assertEqual([each.name for each in self.folder.iterdir()], ["kept"])
            (found,) = shardlab.run("runs", store=Path("kept"))
            self.assertEqual(found["id"], saved["run_id"])

    def test_paths_in_dictionaries_are_relative_to_the_working_directory(self):
        profile = subprocess.run(
            [shardlab.binary(), "scenarios", "--hardware", "cpu"],
            check=True,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        ).stdout
        Path("own.toml").write_text(profile)
        for hardware in ["own.toml", "./own.toml", Path("own.toml"), Path("own.toml").resolve()]:
            job = {**JOB, "mesh": {**JOB["mesh"], "hardware": hardware}}
            self.assertEqual(shardlab.predict(job)["hardware"], shardlab.predict(JOB)["hardware"])
        points = shardlab.sweep({**JOB, "sweep": {"mesh.hardware": ["cpu", "own.toml"]}})
        self.assertEqual(points[0]["step_ms"], points[1]["step_ms"])
        Path("base.toml").write_text(shardlab.dumps(JOB))
        extended = shardlab.predict({"extends": "base.toml", "mesh": {"dp_shard": 4}})
        self.assertEqual(extended["world_size"], 4)
        self.assertEqual(shardlab.predict({"extends": "small-native"})["world_size"], 4)

    def test_temporary_files_are_removed(self):
        with mock.patch.dict(os.environ, TMPDIR=str(self.folder)):
            with mock.patch.object(tempfile, "tempdir", None):
                shardlab.predict(JOB)
                with self.assertRaises(shardlab.Error):
                    shardlab.predict({**JOB, "model": {}})
        self.assertEqual(list(self.folder.iterdir()), [])


class Errors(InFolder):
    def test_bad_input_says_where_it_is(self):
        with self.assertRaises(shardlab.Error) as caught:
            shardlab.predict({**JOB, "fsdp": {"polcy": "native"}})
        error = caught.exception
        self.assertEqual(error.exit_code, 2)
        self.assertTrue(str(error).startswith("scenario.toml:"), error)
        self.assertIn("policy", error.message)
        self.assertNotIn(tempfile.gettempdir(), error.message)
        self.assertEqual(error.results, [])

    def test_unknown_files_options_and_verbs_are_bad_input(self):
        for call in [
            lambda: shardlab.predict("no-such-scenario"),
            lambda: shardlab.predict("--help"),
            lambda: shardlab.predict(JOB, set={"fsdp.nothing": 1}),
            lambda: shardlab.predict(JOB, no_such_option=True),
            lambda: shardlab.run("no-such-verb"),
        ]:
            with self.assertRaises(shardlab.Error) as caught:
                call()
            self.assertEqual(caught.exception.exit_code, 2)

    def test_none_is_rejected_before_anything_runs(self):
        with self.assertRaisesRegex(TypeError, "^mesh.hardware is None"):
            shardlab.predict({"mesh": {"hardware": None}})
        with self.assertRaisesRegex(TypeError, "^fsdp.policy is None"):
            shardlab.predict(JOB, set={"fsdp.policy": None})

    def test_errors_survive_pickling(self):
        error = pickle.loads(pickle.dumps(shardlab.Error("why", 3, [{"step": 1}])))
        self.assertEqual((str(error), error.exit_code, error.results), ("why", 3, [{"step": 1}]))


class Binaries(InFolder):
    def stand_in(self, script):
        """Replaces the binary by a shell script."""
        path = self.folder / "stand-in"
        path.write_text(f"#!/bin/sh\n{textwrap.dedent(script)}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        patch = mock.patch.dict(os.environ, SHARDLAB_BIN=str(path))
        patch.start()
        self.addCleanup(patch.stop)

    def test_failed_checks_are_results(self):
        self.stand_in("""echo '{"ok": false}'; exit 1""")
        self.assertEqual(shardlab.check(JOB), {"ok": False})

    def test_a_failed_run_keeps_what_was_printed(self):
        self.stand_in(
            """echo '{"step": 1}'; printf '{"ste'; echo 'error: disk is full' >&2; exit 3"""
        )
        with self.assertRaises(shardlab.Error) as caught:
            shardlab.run("exec", "job")
        error = caught.exception
        self.assertEqual((error.message, error.exit_code), ("disk is full", 3))
        self.assertEqual(error.results, [{"step": 1}])

    def test_a_signal_is_named(self):
        self.stand_in("kill -9 $$")
        with self.assertRaisesRegex(shardlab.Error, "signal 9") as caught:
            shardlab.predict(JOB)
        self.assertEqual(caught.exception.exit_code, -9)

    def test_status_1_without_a_result_is_an_error(self):
        self.stand_in("exit 1")
        with self.assertRaisesRegex(shardlab.Error, "exit status 1"):
            shardlab.predict(JOB)

    def test_warnings_are_python_warnings(self):
        self.stand_in("""echo 'warning: vocab is odd' >&2; echo '{}'""")
        with self.assertWarnsRegex(UserWarning, "^vocab is odd$") as caught:
            shardlab.predict(JOB)
        self.assertEqual(caught.filename, __file__)

    def test_arguments_arrive_as_on_the_command_line(self):
        self.stand_in("""for each; do printf '{"argument": "%s"}\\n' "$each"; done""")
        found = shardlab.run("runs", "show", "--", "-x", store="a b")
        self.assertEqual(
            [each["argument"] for each in found],
            ["runs", "--store", "a b", "show", "--json", "--", "-x"],
        )

    def test_the_binary_of_the_variable_has_to_exist(self):
        with mock.patch.dict(os.environ, SHARDLAB_BIN=str(self.folder / "nothing")):
            with self.assertRaisesRegex(shardlab.BinaryNotFound, "SHARDLAB_BIN="):
                shardlab.version()

    def test_the_path_is_searched_last(self):
        self.stand_in("echo shardlab 9.9.9")
        (self.folder / "stand-in").rename(self.folder / "shardlab")
        os.environ.pop("SHARDLAB_BIN")
        with mock.patch.dict(os.environ, PATH=f"{self.folder}{os.pathsep}{os.environ['PATH']}"):
            with mock.patch("shardlab._binary._installed", return_value=iter([])):
                self.assertEqual(shardlab.version(), "9.9.9")
        with mock.patch.dict(os.environ, PATH=str(self.folder / "nothing")):
            with mock.patch("shardlab._binary._installed", return_value=iter([])):
                with self.assertRaisesRegex(shardlab.BinaryNotFound, "SHARDLAB_BIN"):
                    shardlab.version()

    def test_the_module_is_the_command_line_too(self):
        for arguments, status in [(["--version"], 0), (["sim", "no-such-scenario"], 2)]:
            done = subprocess.run(
                [sys.executable, "-m", "shardlab", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                check=False,
            )
            self.assertEqual(done.returncode, status)


if __name__ == "__main__":
    unittest.main()
