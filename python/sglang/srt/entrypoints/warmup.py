"""The first request, sent by the server itself, and what a server says when it is ready."""

from __future__ import annotations

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

_WARMUP_TOKENS = 8
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def probe_request(manager: TokenizerManager, max_new_tokens: int, num_prompts: int = 1) -> GenerateReqInput:
    """A greedy request with the shortest prompt there is, once or several times."""
    bos = manager.tokenizer.bos_token_id
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    prompts = ((0 if bos is None else bos,),) * num_prompts
    return GenerateReqInput(prompts, (params,) * num_prompts, stream=False)


async def warm_up(manager: TokenizerManager) -> None:
    """Generate a few tokens, so that the first user does not wait for what happens once; errors pass through."""
    room = manager.limits.context_len - 1
    # sent at once, they go to different replicas
    await manager.generate_whole(probe_request(manager, min(_WARMUP_TOKENS, room), manager.num_replicas))
    # users must not meet a prefix in the cache that none of them sent
    await manager.control("flush_cache")


def ready_message(server_args: ServerArgs) -> str:
    """The line that programs wait for, and two ways to ask that work as they stand, with a key in ``API_KEY`` if one is
    needed: what is printed here may end up in a log, where no key belongs."""
    host = _ANY_ADDRESS.get(server_args.host, server_args.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{server_args.port}/v1"
    model = server_args.served_model_name or server_args.model_path
    has_key = server_args.api_key is not None
    header = ' \\\n  -H "Authorization: Bearer $API_KEY"' if has_key else ""
    imports, key = "from openai import OpenAI", '"none"'
    if has_key:
        imports, key = f"import os\n{imports}", 'os.environ["API_KEY"]'
    return f"""The server is fired up and ready to roll!

Ask it from a shell:

curl {url}/chat/completions -H "Content-Type: application/json"{header} \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is 7 + 5?"}}]}}'

or from Python:

{imports}
client = OpenAI(base_url="{url}", api_key={key})
reply = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "What is 7 + 5?"}}]
)
print(reply.choices[0].message.content)
"""
