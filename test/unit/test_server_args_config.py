"""`--config FILE`: arguments from YAML, the command line over them, and what is wrong with a file in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.server_args import ServerArgs, prepare_server_args

MODEL = "model-path: tiny-gemma4\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


def parse(file: Path, text: str, *argv: str) -> ServerArgs:
    file.write_text(text)
    return prepare_server_args(["--config", str(file), *argv])


def test_every_kind_of_argument(file: Path) -> None:
    args = parse(
        file,
        """
        # a comment
        model: tiny-gemma4          # another name of the flag
        page_size: 16               # underscores are as good
        mem-fraction-static: 1
        cuda-graph-bs: [1, 2, 4]
        enable-metrics: true
        log-requests: false
        dtype: half
        api-key: "123"
        json-model-override-args: {sliding_window: 8}
        max-total-tokens:
        """,
    )
    assert (args.model_path, args.page_size, args.mem_fraction_static) == ("tiny-gemma4", 16, 1.0)
    assert (args.cuda_graph_bs, args.enable_metrics, args.log_requests) == ((1, 2, 4), True, False)
    assert (args.dtype, args.api_key, args.model_overrides) == ("float16", "123", {"sliding_window": 8})
    assert args.max_total_tokens is None and args.port == 30000


def test_the_command_line_wins(file: Path) -> None:
    text = MODEL + "port: 31000\npage-size: 4\n"
    args = parse(file, text, "--port", "32000", "--model", "other")
    assert (args.port, args.page_size, args.model_path) == (32000, 4, "other")
    file.write_text("")
    assert prepare_server_args(["--model", "x", f"--config={file}"]).model_path == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "has an unknown key 'prot': did you mean port?"),
        ("zzzzzz: 1", "has an unknown key 'zzzzzz': see --help"),
        ("1: 1", "has an unknown key '1'"),
        ("config: other.yaml", "has an unknown key 'config'"),
        ("port: high", "--port must be an integer at least 1 and at most 65535, got 'high'"),
        ("port: [1]", "--port must be"),
        ("enable-metrics: 1", "--enable-metrics must be true or false, got 1"),
        ("host: 5", "--host must be a non-empty string, got 5"),
        ("model: a\nmodel-path: b", "gives --model-path twice"),
        ("quantization: fp8", "--quantization is not supported"),
        ("- port", "must hold names and values, got a list"),
        ("port: [", "is not valid YAML"),
        ("port: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("a: &x [*x, *x]", "unknown key 'a'"),
        ("[" * 5000, "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_one_sentence(file: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(file, text if "model" in text or text[0] in "-[" else MODEL + text)
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


def test_what_asks_for_nothing_is_accepted(file: Path) -> None:
    assert parse(file, MODEL + "pp-size: 1\nenable-lora: false\n").model_path == "tiny-gemma4"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--config '.*none.yaml' cannot be read: No such file"):
        prepare_server_args(["--config", str(tmp_path / "none.yaml")])
    with pytest.raises(ValueError, match="--config"):
        prepare_server_args(["--model", "x", "--config"])


def test_keys_are_never_repeated(file: Path) -> None:
    for text in ("api-key: 987654321", "admin-api-key: [987654321]"):
        with pytest.raises(ValueError, match="api-key must be a non-empty string") as error:
            parse(file, MODEL + text)
        assert "987654321" not in str(error.value)
