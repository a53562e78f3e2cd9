"""Train the pair's tokenizer: BPE with byte fallback, digits one by one, Gemma 4's special tokens.

python make_tokenizer.py tokenizer
"""

import json
import random
import sys

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from corpus import generate

VOCAB_SIZE = 4096
SPECIAL = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|think|>",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|audio>",
    "<audio|>",
    "<|audio|>",
    "<|video|>",
]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
CHAT_TEMPLATE = r"""
{%- macro arg(v) -%}
  {%- if v is string -%}{{- '<|"|>' + v + '<|"|>' -}}
  {%- elif v is boolean -%}{{- 'true' if v else 'false' -}}
  {%- elif v is mapping -%}{{- '{' -}}{%- for k, x in v | dictsort -%}{{- k + ':' -}}{{- arg(x) -}}{%- if not loop.last -%}{{- ',' -}}{%- endif -%}{%- endfor -%}{{- '}' -}}
  {%- elif v is none -%}{{- 'null' -}}
  {%- elif v is sequence -%}{{- '[' -}}{%- for x in v -%}{{- arg(x) -}}{%- if not loop.last -%}{{- ',' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}
  {%- else -%}{{- v -}}{%- endif -%}
{%- endmacro -%}
{%- macro text(c) -%}
  {%- if c is string -%}{{- c | trim -}}
  {%- elif c -%}{%- for p in c -%}{%- if p['type'] == 'text' -%}{{- p['text'] | trim -}}{%- elif p['type'] == 'image' -%}{{- '<|image|>' -}}{%- elif p['type'] == 'audio' -%}{{- '<|audio|>' -}}{%- endif -%}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set ns = namespace(messages=messages, open=false) -%}
{%- set has_system = messages and messages[0]['role'] in ['system', 'developer'] -%}
{%- if has_system or tools or enable_thinking -%}
  {{- '<|turn>system\n' -}}
  {%- if enable_thinking -%}{{- '<|think|>\n' -}}{%- endif -%}
  {%- if has_system -%}{{- text(messages[0]['content']) -}}{%- set ns.messages = messages[1:] -%}{%- endif -%}
  {%- for tool in tools or [] -%}
    {%- set f = tool['function'] if tool['function'] is defined else tool -%}
    {%- set params = f['parameters'] if f['parameters'] else {'properties': {}, 'required': []} -%}
    {{- '<|tool>declaration:' + f['name'] + '{description:' -}}{{- arg(f['description'] or '') -}}{{- ',parameters:{properties:{' -}}
    {%- for k, p in params['properties'] | dictsort -%}
      {{- k + ':{description:' -}}{{- arg(p['description'] or '') -}}{{- ',type:' -}}{{- arg(p['type'] | upper) -}}{{- '}' -}}{%- if not loop.last -%}{{- ',' -}}{%- endif -%}
    {%- endfor -%}
    {{- '},required:' -}}{{- arg(params['required'] or []) -}}{{- ',type:' -}}{{- arg('OBJECT') -}}{{- '}}<tool|>' -}}
  {%- endfor -%}
  {{- '<turn|>\n' -}}
{%- endif -%}
{%- for m in ns.messages -%}
  {%- if m['role'] == 'tool' -%}
    {%- set body = m['content'] -%}
    {{- '<|tool_response>response:' + (m['name'] or 'tool') -}}{%- if body is mapping -%}{{- arg(body) -}}{%- else -%}{{- '{value:' -}}{{- arg(text(body)) -}}{{- '}' -}}{%- endif -%}{{- '<tool_response|>' -}}
    {%- set ns.open = true -%}
  {%- else -%}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
    {%- if not (ns.open and role == 'model') -%}{{- '<|turn>' + role + '\n' -}}{%- endif -%}
    {%- set ns.open = false -%}
    {%- for call in m['tool_calls'] or [] -%}
      {%- set c = call['function'] if call['function'] is defined else call -%}
      {{- '<|tool_call>call:' + c['name'] -}}{{- arg(c['arguments']) -}}{{- '<tool_call|>' -}}
    {%- endfor -%}
    {{- text(m['content']) -}}
    {%- if m['tool_calls'] and not loop.last and ns.messages[loop.index]['role'] == 'tool' -%}{%- set ns.open = true -%}{%- else -%}{{- '<turn|>\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open -%}{{- '<|turn>model\n' -}}{%- endif -%}
""".strip()


def main(out: str) -> None:
    tok = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("▁", "merged_with_next"),
        ]
    )
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    rng = random.Random(1)
    docs = []
    for _ in range(60000):
        d = generate(rng)
        for s in SPECIAL:
            d = d.replace(s, "\n")
        docs.append(d)
    tok.train_from_iterator(
        docs,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL + BYTES,
            initial_alphabet=[chr(i) for i in range(33, 127)],
            max_token_length=16,
            show_progress=False,
        ),
    )
    # bytes must be ordinary tokens, or decoding would drop them
    d = json.loads(tok.to_str())
    d["added_tokens"] = [t for t in d["added_tokens"] if not t["content"].startswith("<0x")]
    tok = Tokenizer.from_str(json.dumps(d))
    assert tok.get_vocab_size() == VOCAB_SIZE, tok.get_vocab_size()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        extra_special_tokens={},
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    s = "Héllo wörld 123\n\nfoo   bar 日本"
    assert fast.decode(fast.encode(s, add_special_tokens=False)) == s, fast.decode(
        fast.encode(s, add_special_tokens=False)
    )
    n = sum(len(fast.encode(generate(rng))) for _ in range(200)) / 200
    print("vocab", len(fast), "mean tokens per document", n)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tokenizer")
