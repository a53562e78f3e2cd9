"""Log-probabilities and hidden states equal transformers', with and without speculation, however they are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.scheduler_driver import SchedulerDriver
from oracle.hf_reference import HFReference
from sglang import Engine
from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.managers.io_struct import TokenOut
from sglang.srt.sampling.logprobs import LogprobOptions, TokenLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.embedded import EmbeddedModel
from sglang.srt.utils.hf_transformers.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

ATOL = 2e-4
ASKED_IDS = (7, 300, 41)
PROMPTS = [[2, *((7 * i * i + 3 * i + n) % 290 + 4 for i in range(n - 1))] for n in (19, 33, 2, 12, 26, 1)]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.7, sampling_seed=3, top_k=9, max_new_tokens=11, ignore_eos=True),
    SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True, logit_bias=((9, 4.0),), repetition_penalty=1.3),
    SamplingParams(temperature=1.3, sampling_seed=4, max_new_tokens=8, ignore_eos=True),
    SamplingParams(temperature=1.0, sampling_seed=5, top_p=0.8, max_new_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True),
]
WISHES: list[dict[str, Any]] = [
    {"logprobs": LogprobOptions(start_len=0, top_num=3, token_ids=ASKED_IDS)},
    {"logprobs": LogprobOptions(start_len=20, top_num=1)},
    {"logprobs": LogprobOptions(top_num=2), "return_hidden_states": True},
    {},
    {"return_hidden_states": True, "logprobs": LogprobOptions(start_len=7)},
    {"logprobs": LogprobOptions(start_len=0, token_ids=(5,))},
]


def close(a: Sequence[float], b: torch.Tensor, atol: float = ATOL) -> bool:
    return torch.allclose(torch.tensor(a), b, atol=atol, rtol=1e-4)


def check_entries(entries: Sequence[TokenLogprobs], table: torch.Tensor, ids: Sequence[int], wish: LogprobOptions):
    """``table`` [R, V]: the log-probabilities where the R tokens ``ids`` were predicted."""
    assert [e.token_id for e in entries] == list(ids)
    for entry, row in zip(entries, table, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=ATOL)
        assert close([v for v, _ in entry.top], row.topk(wish.top_num).values)
        assert close([v for v, _ in entry.top], row[[i for _, i in entry.top]])
        assert tuple(i for _, i in entry.asked) == wish.token_ids
        assert close([v for v, _ in entry.asked], row[list(wish.token_ids)])


def check(out: TokenOut, prompt: list[int], params: SamplingParams, wish: dict[str, Any], hf: HFReference) -> None:
    result = hf.prefill([*prompt, *out.token_ids])
    options, last = wish.get("logprobs"), len(prompt) - 1
    if options is None:
        assert not out.logprobs and not out.prompt_logprobs
    else:
        rows = result.logits[last : last + len(out.token_ids)].clone()
        for j in range(len(out.token_ids)):
            seen = sorted({*prompt, *out.token_ids[:j]})
            scaled = rows[j, seen]
            p = params.repetition_penalty
            rows[j, seen] = torch.where(scaled > 0, scaled / p, scaled * p)
            for token, bias in params.logit_bias:
                rows[j, token] += bias
        temperature = 1.0 if params.is_greedy else params.temperature
        check_entries(out.logprobs, torch.log_softmax(rows / temperature, -1), out.token_ids, options)
        start = len(prompt) if options.start_len == -1 else options.start_len
        assert [e.token_id for e in out.prompt_logprobs] == prompt[start:]
        if start < len(prompt):
            assert out.prompt_logprobs[0] == TokenLogprobs(prompt[start], None)
            table = torch.log_softmax(result.logits[start:last], -1)
            check_entries(out.prompt_logprobs[1:], table, prompt[start + 1 :], options)
    if not wish.get("return_hidden_states"):
        assert not out.hidden_states
    else:
        assert [len(rows) for rows in out.hidden_states] == [len(prompt)] + [1] * (len(out.token_ids) - 1)
        states = [row for rows in out.hidden_states for row in rows]
        assert close(states, result.hidden[: len(states)], atol=2e-3)


FLAGS = {"enable_return_hidden_states": True}


@pytest.mark.parametrize("options", [{"chunked_prefill_size": 8, "page_size": 4}, {}], ids=["chunks", "whole"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", ["eseries", "dense", "moe"])
def test_equal_transformers(kind: str, steps: int, options: dict[str, Any], tiny_checkpoints: Path) -> None:
    hf = HFReference(tiny_checkpoints / kind)
    driver = SchedulerDriver(tiny_checkpoints / kind, tiny_checkpoints / f"{kind}-assistant", steps, **FLAGS, **options)
    plain = SchedulerDriver(tiny_checkpoints / kind, None, 0)
    alone = [plain.tokens([prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for round_ in range(2):  # the second time the prompts are cached
        outs = driver.run(PROMPTS, PARAMS, wishes=WISHES, arrivals=[0, 0, 1, 2, 2, 5])
        assert [out.token_ids for out in outs] == alone, "asking changes no answer"
        for out, prompt, params, wish in zip(outs, PROMPTS, PARAMS, WISHES, strict=True):
            check(out, prompt, params, wish, hf)
        cached = [out.cached_tokens for out in outs]
        if round_:
            assert cached[0] == cached[2] == cached[4] == 0 and cached[1] == 20 and cached[3] > 0, cached


def test_drafts_that_are_drawn(tiny_checkpoints: Path) -> None:
    """Their answers are others than plain decode's, and their entries are those of their own answers."""
    hf = HFReference(tiny_checkpoints / "eseries")
    driver = SchedulerDriver(
        tiny_checkpoints / "eseries",
        tiny_checkpoints / "eseries-assistant",
        3,
        **FLAGS,
        speculative_use_rejection_sampling=True,
    )
    outs = driver.run(PROMPTS, PARAMS, wishes=WISHES)
    assert sum(out.spec.accepted_tokens for out in outs if out.spec is not None) > 0
    for out, prompt, params, wish in zip(outs, PROMPTS, PARAMS, WISHES, strict=True):
        check(out, prompt, params, wish, hf)


@pytest.mark.parametrize("steps", [0, 4])
def test_retraction_keeps_what_was_collected(steps: int, tiny_checkpoints: Path) -> None:
    hf = HFReference(tiny_checkpoints / "eseries")
    driver = SchedulerDriver(
        tiny_checkpoints / "eseries",
        tiny_checkpoints / "eseries-assistant",
        steps,
        **FLAGS,
        max_total_tokens=112,
        chunked_prefill_size=8,
        schedule_conservativeness=0.001,
        max_running_requests=5,
    )
    params = [SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)] * len(PROMPTS)
    outs = driver.run(PROMPTS, params, wishes=WISHES)
    assert driver.scheduler.metrics.totals.num_retractions > 0
    for out, prompt, param, wish in zip(outs, PROMPTS, params, WISHES, strict=True):
        assert len(out.token_ids) == 40
        check(out, prompt, param, wish, hf)


@pytest.mark.parametrize("options", [{}, {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}])
def test_entries_are_cut_with_the_ids(options: dict[str, Any], trained_pair: EmbeddedModel) -> None:
    """Stops inside an accepted run, chains and trees."""
    tokenizer = load_tokenizer(trained_pair.target, trust_remote_code=False)
    pieces = TokenPieces(tokenizer)
    texts = ["Count from 1 to 20.", "Say fox 9 times.", "Count down from 9 to 1."]
    prompts = [
        list(tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True)["input_ids"])
        for t in texts
    ]
    params = [
        SamplingParams(temperature=0.0, max_new_tokens=50, stop=(" 7",)),
        SamplingParams(temperature=0.0, max_new_tokens=7),
        SamplingParams(temperature=0.0, max_new_tokens=50, stop_regex=(r"5\D+4",)),
    ]
    wishes = [{"logprobs": LogprobOptions(start_len=0, top_num=2), "return_hidden_states": True}] * 3
    plain = SchedulerDriver(trained_pair.target, None, 0, pieces=pieces, **FLAGS)
    off = plain.run(prompts, params, wishes=wishes)
    driver = SchedulerDriver(trained_pair.target, trained_pair.assistant, 4, pieces=pieces, **FLAGS, **options)
    on = driver.run(prompts, params, wishes=wishes)
    assert max(out.spec.accepted_tokens for out in on if out.spec is not None) > 5
    for a, b in zip(on, off, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert len(a.logprobs) == len(a.hidden_states) == len(a.token_ids) == len(b.logprobs)
        for x, y in zip((*a.prompt_logprobs[1:], *a.logprobs), (*b.prompt_logprobs[1:], *b.logprobs), strict=True):
            assert x.token_id == y.token_id and x.logprob == pytest.approx(y.logprob, abs=1e-4)
            assert close([v for v, _ in x.top], torch.tensor([v for v, _ in y.top]))
        for rows, others in zip(a.hidden_states, b.hidden_states, strict=True):
            assert close(rows, torch.tensor(others), atol=1e-3)


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine(
        model_path="tiny-gemma4",
        device="cpu",
        max_total_tokens=4096,
        speculative_algorithm="FROZEN_KV_MTP",
        enable_return_hidden_states=True,
    ) as engine:
        yield engine


PROMPT = "<bos><|turn>user\nCount from 3 to 9.<turn|>\n<|turn>model\n"


def test_fields_of_meta_info(engine: Engine) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 2, "top_logprobs_num": 2, "token_ids_logprob": [5, 9]}
    params = {"temperature": 0.0, "max_new_tokens": 8}
    out = engine.generate(PROMPT, params, return_text_in_logprobs=True, return_hidden_states=True, **asked)
    meta, num = out["meta_info"], len(out["output_ids"])
    prompt_len = meta["prompt_tokens"]
    assert [e[1] for e in meta["output_token_logprobs"]] == out["output_ids"]
    assert "".join(e[2] for e in meta["output_token_logprobs"]).startswith(out["text"])
    assert meta["input_token_logprobs"][0][0] is None and len(meta["input_token_logprobs"]) == prompt_len - 2
    assert meta["input_top_logprobs"][0] is None and meta["input_token_ids_logprobs"][0] is None
    assert [len(e) for e in meta["output_top_logprobs"]] == [2] * num
    for entry, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert top[0] == entry and top[0][0] >= top[1][0], "greedy takes the most likely token"
    assert [[e[1] for e in at] for at in meta["output_token_ids_logprobs"]] == [[5, 9]] * num
    assert len(meta["hidden_states"]) == num and len(meta["hidden_states"][0]) == prompt_len
    assert math.isfinite(meta["hidden_states"][1][0])
    bare = engine.generate(PROMPT, params, return_logprob=True)["meta_info"]
    assert bare["input_token_logprobs"] == [] and "output_top_logprobs" not in bare and "hidden_states" not in bare
    assert all(e[2] is None for e in bare["output_token_logprobs"])
    assert "output_token_logprobs" not in engine.generate(PROMPT, params)["meta_info"]


def test_streams_and_samples(engine: Engine) -> None:
    params = {"temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 12, "ignore_eos": True}
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    whole = engine.generate(PROMPT, params, **asked)
    events = list(engine.generate(PROMPT, params, stream=True, **asked))
    assert len(events) > 2
    for event in events:
        assert [e[1] for e in event["meta_info"]["output_token_logprobs"]] == event["output_ids"]
        assert len(event["meta_info"]["input_token_logprobs"]) == event["meta_info"]["prompt_tokens"]
    for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
        last, at_once = events[-1]["meta_info"][name], whole["meta_info"][name]
        flat = [[e[0] if isinstance(e, list) and len(e) == 1 else e for e in side if e] for side in (last, at_once)]
        assert [e[1] for e in flat[0]] == [e[1] for e in flat[1]]
    replies = engine.generate([PROMPT, PROMPT], {**params, "n": 2}, return_logprob=[True, False])
    assert ["output_token_logprobs" in r["meta_info"] for r in replies] == [True, True, False, False]


def test_scoring_a_prompt_without_an_answer(engine: Engine) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 0}
    meta = engine.generate(PROMPT, params, return_logprob=True, logprob_start_len=0)["meta_info"]
    assert meta["output_token_logprobs"] == [] and meta["completion_tokens"] == 0
    entries = meta["input_token_logprobs"]
    assert len(entries) == meta["prompt_tokens"] and all(entry[0] < 0 for entry in entries[1:])


def test_what_is_refused(engine: Engine) -> None:
    params = {"max_new_tokens": 2}
    with pytest.raises(ValueError, match=r"logprob_start_len is 999, but the prompt has"):
        engine.generate(PROMPT, params, return_logprob=True, logprob_start_len=999)
    with pytest.raises(ValueError, match=r"token_ids_logprob has the token id 9999999"):
        engine.generate(PROMPT, params, return_logprob=True, token_ids_logprob=[9999999])
    with pytest.raises(ValueError, match=r"custom_logit_processor is not allowed by this server"):
        engine.generate(PROMPT, params, custom_logit_processor="fixtures.logit_processors:ForbidsAll")
