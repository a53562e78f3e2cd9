"""What a step's result means for its requests: tokens kept, KV committed or closed, and replies."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.managers.detokenizer_manager import TokenPieces
from sglang.srt.managers.io_struct import FinishReason, SpecStats, TokenizedGenerateReqInput, TokenOut
from sglang.srt.managers.metrics import SchedulerMetrics
from sglang.srt.managers.schedule_batch import GenerationBatchResult, Req, ScheduleBatch
from sglang.srt.managers.stop_checker import check_stop
from sglang.srt.mem_cache.kv_manager import KVCacheManager
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.logprobs import ReqOutputs


class OutputProcessor:
    """Edits requests after a step. A request that ends here loses its KV, which is how others see that it ended."""

    def __init__(
        self,
        kv_manager: KVCacheManager,
        pieces: TokenPieces | None,
        metrics: SchedulerMetrics,
        *,
        stream_interval: int,
        num_drafts: int,
    ) -> None:
        self._kv_manager = kv_manager
        self._pieces = pieces
        self._metrics = metrics
        self.stream_interval = stream_interval
        self._num_drafts = num_drafts

    def apply(self, batch: ScheduleBatch, result: GenerationBatchResult) -> list[TokenOut]:
        """Take the result of a step; returns the replies that are due."""
        tokens = result.next_token_ids.tolist()
        runs = [row[:accept_len] for row, accept_len in zip(tokens, result.accept_lens.tolist(), strict=True)]
        reqs = [req for req in batch.reqs if req.kv is not None]
        if batch.mode is ForwardMode.EXTEND:
            self._apply_extend(batch, runs, result.outputs)
        else:
            self._apply_decode(batch, runs, result.num_drafts, result.outputs)
        return [out for req in reqs if (out := self._due_output(req)) is not None]

    def abort(self, req: Req, message: str, status: int | None) -> TokenOut:
        """End a request at whatever stage it is; returns its final reply."""
        self._metrics.totals.num_aborted += 1
        self._finish(req, FinishReason("abort", message=message, status=status))
        return self._output(req)

    def refuse(self, message: TokenizedGenerateReqInput, text: str, status: int) -> TokenOut:
        """The only reply to a request that is not taken."""
        self._metrics.totals.num_aborted += 1
        finish = FinishReason("abort", message=text, status=status)
        none = (0,) * self._num_drafts
        spec = SpecStats(0, 0, 0, none, none) if self._num_drafts else None
        return TokenOut(message.rid, (), finish, len(message.input_ids), 0, 0, spec, queue_time_s=0.0)

    def _apply_extend(
        self, batch: ScheduleBatch, runs: Sequence[Sequence[int]], outputs: Sequence[ReqOutputs | None]
    ) -> None:
        self._metrics.totals.prefill_steps += 1
        asked = outputs or [None] * len(runs)
        for req, extend_len, run, output in zip(batch.reqs, batch.extend_lens, runs, asked, strict=True):
            assert req.kv is not None
            self._kv_manager.commit(req.kv, req.kv.committed_len + extend_len)
            self._kv_manager.cache_unfinished(req.kv, req.token_ids)
            if req.kv.committed_len == len(req.token_ids):
                self._append(req, run, output)
            elif req.asked is not None and output is not None:
                req.asked.add(output, req.kv.committed_len, num_tokens=0)

    def _apply_decode(
        self,
        batch: ScheduleBatch,
        runs: Sequence[Sequence[int]],
        num_drafts: int,
        outputs: Sequence[ReqOutputs | None],
    ) -> None:
        gained, num_rows = 0, sum(req.kv is not None for req in batch.reqs)
        for req, run, output in zip(batch.reqs, runs, outputs or [None] * len(runs), strict=True):
            if req.kv is None:  # it ended, or lost its memory, when this step was already under way
                continue
            kept = self._append(req, run, output)
            gained += kept
            if self._num_drafts:
                # the last token of a run is the target's own, those before it are accepted drafts
                self._count_round(req, num_drafts, min(kept, len(run) - 1))
        self._metrics.count_decode(num_rows, gained)

    def _append(self, req: Req, run: Sequence[int], outputs: ReqOutputs | None) -> int:
        """Keep what the request gets of its run, commit what is in the pool, and end it if it ends; tokens kept."""
        kept, finish = check_stop(req, run, self._pieces)
        if req.asked is not None:
            assert outputs is not None, f"a step gave request {req.rid} nothing of what it asks for"
            req.asked.add(outputs, len(req.token_ids), kept)
        if kept:
            req.token_ids.extend(run[:kept])
            if req.unsent_accept_lens is not None:
                req.unsent_accept_lens.append(kept)
            assert req.kv is not None
            self._kv_manager.commit(req.kv, len(req.token_ids) - 1)
        self._metrics.totals.completion_tokens += kept
        if finish is not None:
            self._metrics.totals.num_finished += 1
            self._finish(req, finish)
        return kept

    def _count_round(self, req: Req, num_drafts: int, num_accepted: int) -> None:
        cap, totals = req.params.speculative_num_steps, self._metrics.totals
        num_usable = num_drafts if cap is None else min(num_drafts, cap)
        if not req.accepted_by_position:
            req.accepted_by_position = [0] * self._num_drafts
            req.drafted_by_position = [0] * self._num_drafts
        req.verify_ct += 1
        req.num_drafted += num_usable
        totals.verify_ct += 1
        for position in range(min(num_usable, self._num_drafts)):
            req.drafted_by_position[position] += 1
            totals.drafted_by_position[position] += 1
        for position in range(num_accepted):
            req.accepted_by_position[position] += 1
            totals.accepted_by_position[position] += 1

    def _finish(self, req: Req, finish: FinishReason) -> None:
        req.finish = finish
        if req.kv is not None:
            self._kv_manager.close(req.kv, req.token_ids)
            req.kv = None

    def _due_output(self, req: Req) -> TokenOut | None:
        """The reply that a step owes a request; a stream gets its first token at once."""
        unsent = req.output_len - req.sent_len
        is_due = req.stream and unsent > 0 and (unsent >= self.stream_interval or req.sent_len == 0)
        return self._output(req) if is_due or req.finish is not None else None

    def _output(self, req: Req) -> TokenOut:
        token_ids, sent, asked = tuple(req.token_ids[req.prompt_len + req.sent_len :]), req.sent_len, req.asked
        req.sent_len = req.output_len
        accept_lens: tuple[int, ...] = ()
        if req.unsent_accept_lens is not None:
            accept_lens, req.unsent_accept_lens = tuple(req.unsent_accept_lens), []
        return TokenOut(
            rid=req.rid,
            token_ids=token_ids,
            finish_reason=req.finish,
            prompt_tokens=req.prompt_len,
            completion_tokens=req.output_len,
            cached_tokens=req.cached_len or 0,
            spec=self._spec_stats(req) if self._num_drafts else None,
            queue_time_s=0.0 if req.first_run_s is None else req.first_run_s - req.arrival_s,
            logprobs=() if asked is None else tuple(asked.output_logprobs[sent:]),
            prompt_logprobs=() if asked is None else asked.take_prompt_logprobs(),
            hidden_states=() if asked is None else tuple(asked.output_hidden[sent:]),
            accept_lens=accept_lens,
        )

    def _spec_stats(self, req: Req) -> SpecStats:
        none = (0,) * self._num_drafts
        accepted, drafted = tuple(req.accepted_by_position) or none, tuple(req.drafted_by_position) or none
        return SpecStats(req.verify_ct, sum(accepted), req.num_drafted, accepted, drafted)
