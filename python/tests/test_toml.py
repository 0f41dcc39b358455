"""Tests the TOML text of dictionaries."""

import math
import sys
import unittest
from fractions import Fraction
from pathlib import Path

from shardlab import _toml, dumps

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

DOCUMENT = {
    "extends": "base.toml",
    "model": {"layers": 2, "name": 'a "b" \\ c\nd\te\x00\x7f é 🦀', "theta": 1e6},
    "fsdp": {
        "units": {"layers.*": {"prefetch": [1, 2, [3]], "": True}, "a b": {}},
        "exact": 0.1,
        "none": [],
    },
    "sweep": {"mesh.dp_shard,mesh.dp_replicate": [[16, 1], [8, 2]]},
}


class Values(unittest.TestCase):
    def test_each_type_is_written_as_toml(self):
        for item, text in [
            (True, "true"),
            (False, "false"),
            (0, "0"),
            (-(2**63), "-9223372036854775808"),
            (1.0, "1.0"),
            (1e16, "1e+16"),
            (5e-324, "5e-324"),
            (math.inf, "inf"),
            (-math.inf, "-inf"),
            (math.nan, "nan"),
            (Fraction(1, 2), "0.5"),
            ("", '""'),
            ('a"b\\c', '"a\\"b\\\\c"'),
            ("a\nb\tc\rd", '"a\\nb\\tc\\rd"'),
            ("\x00\x1f\x7f", '"\\u0000\\u001F\\u007F"'),
            ("é🦀", '"é🦀"'),
            (Path("a/b.toml"), '"a/b.toml"'),
            ([], "[]"),
            ((1, "a", [2.5]), '[1, "a", [2.5]]'),
            ({}, "{}"),
            ({"a": 1, "b c": {"d": True}}, '{ a = 1, "b c" = { d = true } }'),
        ]:
            with self.subTest(item=item):
                self.assertEqual(_toml.value(item), text)

    def test_what_toml_lacks_is_rejected_with_its_key(self):
        for document, error, message in [
            ({"fsdp": {"units": {"a": None}}}, TypeError, "fsdp.units.a is None"),
            ({"fsdp": {"axes": [1, None]}}, TypeError, "fsdp.axes.1 is None"),
            ({"extends": None}, TypeError, "extends is None"),
            ({"model": {"x": {1, 2}}}, TypeError, "model.x is a set"),
            ({"model": {"x": b"y"}}, TypeError, "model.x is a bytes"),
            ({"model": {3: 1}}, TypeError, "model.3: keys must be strings"),
            ({3: {}}, TypeError, "3: keys must be strings"),
            ({"model": {"x": 2**63}}, ValueError, "model.x = 9223372036854775808 does not fit"),
            ({"model": {"x": "\ud800"}}, ValueError, "model.x is not valid Unicode"),
            (["model"], TypeError, "a mapping is expected, not list"),
        ]:
            with self.subTest(document=document):
                with self.assertRaisesRegex(error, f"^{message}"):
                    dumps(document)


class Documents(unittest.TestCase):
    def test_sections_follow_the_keys_that_have_none(self):
        self.assertEqual(
            dumps({"mesh": {"dp_shard": 4}, "extends": "a", "a b": {}}),
            'extends = "a"\n[mesh]\ndp_shard = 4\n["a b"]\n',
        )

    @unittest.skipIf(tomllib is None, "tomllib came with Python 3.11")
    def test_a_parser_reads_the_same_document(self):
        self.assertEqual(tomllib.loads(dumps(DOCUMENT)), DOCUMENT)

    @unittest.skipIf(tomllib is None, "tomllib came with Python 3.11")
    def test_a_parser_reads_the_same_characters(self):
        for code in [*range(0x180), 0x2028, 0xFEFF, 0xFFFF, 0x10FFFF]:
            text = chr(code)
            with self.subTest(code=hex(code)):
                read = tomllib.loads(dumps({"section": {text: text}}))
                self.assertEqual(read, {"section": {text: text}})


if __name__ == "__main__":
    unittest.main()
