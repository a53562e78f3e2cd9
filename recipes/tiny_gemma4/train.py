"""Train the tiny Gemma 4 target and its MTP assistant (one GPU, a quarter of an hour).

    python make_tokenizer.py tokenizer
    python train.py --out OUT --phase train && python train.py --out OUT --phase eval

The target is an E-series Gemma 4 in miniature: per-layer embeddings, shared-KV upper
layers, sliding and full attention, tied head, final logit soft cap. The assistant is
distilled from it by unrolling the frozen-KV recurrence: at position p it sees the
target's keys and values of positions < p, the target's last hidden state at p-1 and
the embedding of token p, and predicts token p+1; later steps feed its own projected
state and the next token at the *same* position p.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from transformers import (
    AutoTokenizer,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
)

from corpus import generate

HERE = os.path.dirname(os.path.abspath(__file__))
SLIDING_WINDOW = 64
DRAFT_STEPS = 5


def target_config(vocab):
    return Gemma4TextConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=vocab,
        use_double_wide_mlp=True,
        final_logit_softcapping=30.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )


def assistant_config(vocab, backbone):
    text = Gemma4TextConfig(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=4,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        use_double_wide_mlp=False,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=backbone,
        use_ordered_embeddings=True,
        num_centroids=64,
        centroid_intermediate_top_k=8,
        tie_word_embeddings=True,
    )


# --- data -----------------------------------------------------------------------------------------


def worker(seed, rows, length, queue):
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tok = AutoTokenizer.from_pretrained(os.path.join(HERE, "tokenizer"))
    rng, buf = random.Random(seed), []
    while True:
        while len(buf) < rows * length:
            for ids in tok([generate(rng) for _ in range(64)], add_special_tokens=False)["input_ids"]:
                buf.extend(ids)
        queue.put(torch.tensor(buf[: rows * length], dtype=torch.int16).view(rows, length))
        buf = buf[rows * length :]


class Data:
    def __init__(self, batch, length, workers, device):
        ctx = mp.get_context("spawn")
        self.rows, self.batch, self.device = 8, batch, device
        self.queue = ctx.Queue(maxsize=64)
        self.procs = [
            ctx.Process(target=worker, args=(1000 + i, self.rows, length, self.queue), daemon=True)
            for i in range(workers)
        ]
        for p in self.procs:
            p.start()

    def next(self):
        return torch.cat([self.queue.get() for _ in range(self.batch // self.rows)]).to(self.device).long()

    def stop(self):
        for p in self.procs:
            p.terminate()


def answer_weights(ids, tok, other=0.1):
    """Loss weight of each token: 1 inside model turns (end of turn included), `other` elsewhere."""
    turn, end, model = (tok.convert_tokens_to_ids(t) for t in ("<|turn>", "<turn|>", "model"))
    idx = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
    none = torch.full_like(ids, -1)
    opens = (ids == turn) & (F.pad(ids, (0, 1))[:, 1:] == model)
    start = torch.where(opens, idx, none).cummax(dim=1).values
    stop = torch.where(ids == end, idx, none).cummax(dim=1).values
    inside = start > stop
    inside = (inside & (idx > start + 2)) | ((ids == end) & F.pad(inside, (1, 0))[:, :-1])
    return torch.where(inside, 1.0, other)


def optimizer(model, lr):
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        eps=1e-8,
    )


def lr_at(frac, peak):
    warm = 0.02
    return peak * (
        frac / warm if frac < warm else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (frac - warm) / (1 - warm)))
    )


# --- target ---------------------------------------------------------------------------------------


def train_target(args, tok, data, device):
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(target_config(len(tok))).to(device)
    print("target parameters", sum(p.numel() for p in model.parameters()), flush=True)
    opt, t0, step, limit = optimizer(model, args.lr), time.time(), 0, args.target_minutes * 60
    while (el := time.time() - t0) < limit:
        for g in opt.param_groups:
            g["lr"] = lr_at(el / limit, args.lr)
        ids = data.next()
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        weight = answer_weights(ids, tok)[:, 1:].flatten()
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (loss * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        if step % args.log == 0:
            print(
                f"target step {step} loss {loss.item():.4f} {el:.0f}s {step * ids.numel() / max(el, 1):.0f} tok/s",
                flush=True,
            )
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=2,
        pad_token_id=0,
        do_sample=False,
        eos_token_id=[1, tok.convert_tokens_to_ids("<turn|>"), tok.convert_tokens_to_ids("<|tool_response>")],
    )
    model.save_pretrained(os.path.join(args.out, "target"), max_shard_size="9MB")
    tok.save_pretrained(os.path.join(args.out, "target"))
    return model


# --- assistant ------------------------------------------------------------------------------------


def frozen_masks(length, device):
    """Row p may read keys j < p (full) or the last SLIDING_WINDOW of them (sliding)."""
    q, k = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None]
    full = k < q
    slide = full & (k >= q - SLIDING_WINDOW)
    full[0, 0] = slide[0, 0] = True  # row 0 has no prefix; it is left out of the loss
    return {"full_attention": full[None, None], "sliding_attention": slide[None, None]}


def unroll(target, assistant, ids, masks, steps):
    """Yield (step, last hidden, target logits) for each draft step; rows are positions p = 1 .. T-1-step."""
    with torch.no_grad():
        out = target(input_ids=ids, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    length = ids.shape[1]
    embed = target.get_input_embeddings()
    hidden = torch.cat([torch.zeros_like(out.hidden_states[-1][:, :1]), out.hidden_states[-1][:, :-1]], dim=1)
    pos = torch.arange(length, device=ids.device)[None].expand(ids.shape[0], -1)
    for s in range(steps):
        shifted = torch.cat([ids[:, s:], ids.new_zeros(ids.shape[0], s)], dim=1)
        with torch.no_grad():
            e = embed(shifted)
        x = assistant.pre_projection(torch.cat([e.to(hidden.dtype), hidden], dim=-1))
        h = assistant.model(
            inputs_embeds=x,
            attention_mask=masks,
            position_ids=pos,
            shared_kv_states=out.shared_kv_states,
            use_cache=False,
        ).last_hidden_state
        hidden = assistant.post_projection(h)
        yield s, h[:, 1 : length - s], out.logits[:, 1 + s :]


def balanced_clusters(weight, clusters, iters=20):
    """Equal-sized k-means over the rows of weight; returns the row order, cluster by cluster."""
    w = F.normalize(weight.float(), dim=-1)
    n, size = w.shape[0], w.shape[0] // clusters
    g = torch.Generator(device="cpu").manual_seed(0)
    c = w[torch.randperm(n, generator=g)[:clusters].to(w.device)]
    for _ in range(iters):
        sim = (w @ c.T).cpu()
        order = sim.max(dim=1).values.argsort(descending=True).tolist()
        prefer = sim.argsort(dim=1, descending=True).tolist()
        left, assign = [size] * clusters, [0] * n
        for i in order:
            for k in prefer[i]:
                if left[k]:
                    left[k] -= 1
                    assign[i] = k
                    break
        a = torch.tensor(assign, device=w.device)
        c = F.normalize(torch.stack([w[a == k].mean(0) for k in range(clusters)]), dim=-1)
    return torch.argsort(a, stable=True), a


def train_assistant(args, tok, target, data, device):
    torch.manual_seed(1)
    target.eval().requires_grad_(False).to(torch.bfloat16)
    cfg = assistant_config(len(tok), target.config.hidden_size)
    model = Gemma4AssistantForCausalLM(cfg).to(device)
    print("assistant parameters", sum(p.numel() for p in model.parameters()), flush=True)
    opt, t0, step, limit, assign = optimizer(model, args.lr), time.time(), 0, args.assistant_minutes * 60, None
    masks = None
    while (el := time.time() - t0) < limit:
        for g in opt.param_groups:
            g["lr"] = lr_at(el / limit, args.lr)
        ids = data.next()
        if masks is None:
            masks = frozen_masks(ids.shape[1], device)
        if assign is None and el > 0.4 * limit:
            order, assign = balanced_clusters(model.lm_head.weight.detach(), cfg.num_centroids)
            model.masked_embedding.token_ordering.copy_(order)
            w = model.lm_head.weight.detach()
            model.masked_embedding.centroids.weight.data.copy_(
                torch.stack([w[assign == k].mean(0) for k in range(cfg.num_centroids)])
            )
            print("clustered", flush=True)
        loss, parts = 0.0, []
        weights = answer_weights(ids, tok, other=0.05)
        with torch.autocast(device, dtype=torch.bfloat16):
            for s, h, teacher in unroll(target, model, ids, masks, DRAFT_STEPS):
                logits = model.lm_head(h)
                logp = F.log_softmax(logits.float(), dim=-1)
                t = F.softmax(teacher.float(), dim=-1)
                w = weights[:, 2 + s :]  # weight of the token each row predicts
                w = F.pad(w, (0, h.shape[1] - w.shape[1]))
                part = (-(t * logp).sum(-1) * w).sum() / w.sum()
                loss = loss + part * (0.9**s)
                with torch.no_grad():
                    best = teacher.argmax(-1)
                    parts.append(((logits.argmax(-1) == best) * w).sum() / w.sum())
                if assign is not None:
                    c = model.masked_embedding.centroids(h).float()
                    cluster_mass = torch.zeros_like(c).index_add_(-1, assign, t)
                    loss = loss - ((cluster_mass * F.log_softmax(c, -1)).sum(-1) * w).sum() / w.sum() * (0.9**s)
                    if s == 0:
                        with torch.no_grad():
                            hit = (c.topk(cfg.centroid_intermediate_top_k, -1).indices == assign[best][..., None]).any(
                                -1
                            )
                            parts.append(hit.float().mean())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        if step % args.log == 0:
            print(
                f"assistant step {step} loss {loss.item():.4f} agree {[round(p.item(), 3) for p in parts]} {el:.0f}s",
                flush=True,
            )
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(num_assistant_tokens=4, num_assistant_tokens_schedule="constant")
    model.save_pretrained(os.path.join(args.out, "assistant"))
    tok.save_pretrained(os.path.join(args.out, "assistant"))
    return model


# --- evaluation -----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(args, tok, target, assistant, device):
    import corpus

    rng = random.Random(99)
    target.eval(), assistant.eval()
    target.to(torch.float32), assistant.to(torch.float32)
    report = {}
    for task, _ in corpus.TASKS:
        good = total = 0
        prompts, answers = [], []
        while len(prompts) < args.eval:
            q, _, a = task(rng)
            prompts.append(
                tok.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
            )
            answers.append(a)
        enc = tok(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        out = target.generate(**enc, max_new_tokens=260, do_sample=False)
        for o, a in zip(out, answers):
            text = tok.decode(o[enc["input_ids"].shape[1] :], skip_special_tokens=True).strip()
            good, total = good + (text == a.strip()), total + 1
        report[task.__name__] = good / total
    print("exact answers:", json.dumps(report), flush=True)
    lengths = {}
    for task in (corpus.count, corpus.story, corpus.code, corpus.recall, corpus.arithmetic, corpus.copy_passage):
        calls = toks = 0
        for _ in range(3):
            q, _, a = task(rng)
            p = tok.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
            ids = tok(p, return_tensors="pt", add_special_tokens=False).input_ids.to(device)
            counter = {"n": 0}
            hook = target.model.register_forward_hook(lambda *_: counter.__setitem__("n", counter["n"] + 1))
            plain = target.generate(ids, max_new_tokens=150, do_sample=False)
            counter["n"] = 0
            spec = target.generate(ids, assistant_model=assistant, max_new_tokens=150, do_sample=False)
            hook.remove()
            if plain.tolist() != spec.tolist():
                print("MISMATCH", task.__name__, flush=True)
            calls += counter["n"] - 1
            toks += spec.shape[1] - ids.shape[1] - 1
        lengths[task.__name__] = toks / max(calls, 1)
    print("tokens per verify (4 drafts):", json.dumps(lengths), flush=True)
    for q in ("Hello!", "Tell me a story about a fox.", "What is 17 + 25?", "Count from 3 to 20."):
        p = tok.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True)
        ids = tok(p, return_tensors="pt", add_special_tokens=False).input_ids.to(device)
        print(
            q,
            "->",
            tok.decode(target.generate(ids, max_new_tokens=120, do_sample=False)[0, ids.shape[1] :]),
            flush=True,
        )
    with open(os.path.join(args.out, "report.json"), "w") as f:
        json.dump({"exact_answers": report, "tokens_per_verify_4_drafts": lengths}, f, indent=1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="out")
    p.add_argument("--phase", choices=["train", "eval"], default="train")
    p.add_argument("--target-minutes", type=float, default=9)
    p.add_argument("--assistant-minutes", type=float, default=6)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--length", type=int, default=1024)
    p.add_argument("--workers", type=int, default=14)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--log", type=int, default=50)
    p.add_argument("--eval", type=int, default=64)
    args = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tok = AutoTokenizer.from_pretrained(os.path.join(HERE, "tokenizer"))
    if args.phase == "train":
        data = Data(args.batch, args.length, args.workers, device)
        target = train_target(args, tok, data, device)
        train_assistant(args, tok, target, data, device)
        data.stop()
    else:
        target = Gemma4ForCausalLM.from_pretrained(os.path.join(args.out, "target")).to(device)
        assistant = Gemma4AssistantForCausalLM.from_pretrained(os.path.join(args.out, "assistant")).to(device)
        evaluate(args, tok, target, assistant, device)


if __name__ == "__main__":
    main()
