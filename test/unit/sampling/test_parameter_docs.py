"""The page about sampling parameters has every field with its true default."""

from __future__ import annotations

import json
import re
from dataclasses import fields

from fixtures.source_tree import ROOT
from sglang.srt.sampling.logprobs import LogprobOptions
from sglang.srt.sampling.sampling_params import SamplingParams

PAGE = (ROOT / "docs" / "sampling_parameters.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", PAGE, flags=re.MULTILINE))


def test_every_field_and_default() -> None:
    expected = {f.name: json.dumps(f.default) for f in fields(SamplingParams)} | {"logit_bias": "{}"}
    missing = {name: default for name, default in expected.items() if ROWS.get(name) != default}
    assert not missing
    options = LogprobOptions()
    assert (ROWS["logprob_start_len"], ROWS["top_logprobs_num"]) == (str(options.start_len), str(options.top_num))


def test_there_is_no_row_without_a_field() -> None:
    beside = {"return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs"}
    assert ROWS.keys() == {f.name for f in fields(SamplingParams)} | beside
