"""The page at `/` in a real browser: what a user does and sees there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from fixtures.browser import INSTALL, PageLog, chromium, find_chromium
from fixtures.server_process import ServerProcess, ready_server
from fixtures.waiting import wait_until

CHROMIUM = find_chromium()
KEY = "open sesame"
STORY = "Tell me a story about a fox."
WAIT_MS = 60_000
# one line of the browser for each request without the key
UNAUTHORIZED = "Failed to load resource: the server responded with a status of 401 (Unauthorized)"
# a page that is drawn by software on a busy machine, behind a server that starts
pytestmark = pytest.mark.timeout(300)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=INSTALL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    args = ("--speculative-algorithm", "FROZEN_KV_MTP", "--speculative-num-steps", "4", "--api-key", KEY)
    with ready_server(tmp_path_factory.mktemp("playground"), *args) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with chromium(CHROMIUM) as running:
        yield running


@pytest.fixture
def log() -> PageLog:
    return PageLog()


@pytest.fixture
def page(server: ServerProcess, browser: Browser, log: PageLog) -> Iterator[Page]:
    """The page, with the key entered. It may talk to its own server only, and complain of the missing key only."""
    opened = browser.new_page()
    opened.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    log.attach(opened)
    opened.goto(server.url)
    expect(opened.locator("#model")).to_have_text("enter the API key in the settings")
    enter_key(opened, KEY)
    expect(opened.locator("#model")).to_have_text("tiny-gemma4 · FROZEN_KV_MTP, 4 drafts a round")
    assert log.problems == [UNAUTHORIZED]
    log.problems.clear()
    yield opened
    opened.close()
    assert log.problems == []
    assert [url for url in log.urls if not url.startswith(server.url + "/")] == []


def enter_key(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Tab")


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def requests(page: Page) -> list[Any]:
    """Bodies of the chat requests from here on, which the page appends to."""
    sent: list[Any] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.url.endswith("/v1/chat/completions") else None)
    return sent


def last_answer(page: Page) -> Locator:
    """The newest answer, when it is complete."""
    answer = page.locator(".answer").last
    expect(answer.locator(".figures")).not_to_be_empty()
    return answer


def bars(answer: Locator) -> list[int]:
    label = answer.locator(".rounds").get_attribute("aria-label")
    assert label is not None
    return [int(length) for length in re.findall(r"\d+", label)]


def from_the_api(server: ServerProcess, content: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "return_accept_lens": True, **fields}
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()["choices"][0]


@needs_browser
def test_an_answer_is_shaded_by_its_rounds(page: Page, server: ServerProcess) -> None:
    ask(page, STORY)
    answer = last_answer(page)
    expected = from_the_api(server, STORY)
    assert answer.locator(".content").text_content() == expected["message"]["content"]
    first, *rounds = expected["accept_lens"]
    assert first == 1 and len(set(rounds)) > 2 and bars(answer) == rounds
    # each token has its place, and the text of a round is within it
    places = [int(p) for p in re.findall(r"token place-(\d)", answer.locator(".content").inner_html())]
    assert places == [place for length in expected["accept_lens"] for place in range(length)][: len(places)]
    assert len(places) in (sum(expected["accept_lens"]), sum(expected["accept_lens"]) - 1), (
        "the end of the turn is empty"
    )
    titles = [token.get_attribute("title") for token in answer.locator(".token").all()[:3]]
    assert titles[0] == "with the prompt" and titles[1] == "round 1, token 1"
    # deeper places are painted stronger
    tints = [
        answer.locator(f".token.place-{place}").first.evaluate("token => getComputedStyle(token).backgroundColor")
        for place in range(5)
    ]
    alphas = [float(tint.rstrip(")").split()[-1]) for tint in tints]
    assert alphas == sorted(alphas) and len(set(alphas)) == 5
    length = (sum(rounds)) / len(rounds)
    shown = answer.locator(".figures").text_content() or ""
    assert f"{sum(rounds) + 1} tokens in {len(rounds)} rounds · accept length {length:.2f} · " in shown
    assert page.locator("#live [data-figure=accept]").text_content() == f"{length:.2f}"
    assert float(page.locator("#live [data-figure=rate]").text_content() or "") > 0
    page.get_by_label("Shade tokens").uncheck()
    plain = answer.locator(".token").first.evaluate("token => getComputedStyle(token).backgroundColor")
    assert plain == "rgba(0, 0, 0, 0)"


@needs_browser
def test_both_ways_say_the_same(page: Page) -> None:
    sent = requests(page)
    page.get_by_role("radio", name="Compare").check()
    for temperature, seed in (("0", ""), ("1.2", "7")):
        page.get_by_label("Temperature").fill(temperature)
        page.get_by_label("Seed").fill(seed)
        ask(page, "Write a short story about a bear.")
        verdict = page.locator(".message.model").last.locator(".verdict")
        expect(verdict).to_have_text(re.compile(r"^Identical text · \d+\.\d\d × the speed with speculation$"))
        on, off = page.locator(".message.model").last.locator(".answer").all()
        assert (
            on.get_attribute("aria-label") == "Speculation on" and off.get_attribute("aria-label") == "Speculation off"
        )
        assert on.locator(".content").text_content() == off.locator(".content").text_content() != ""
        assert max(bars(on)) > 1 and set(bars(off)) == {1} and sum(bars(on)) == sum(bars(off))
    assert [body["speculative"] for body in sent] == [True, False] * 2
    # where the user gives no seed the page draws one for both
    assert sent[0]["seed"] == sent[1]["seed"] >= 0 and [body["seed"] for body in sent[2:]] == [7, 7]


@needs_browser
def test_a_chat_goes_on_and_begins_anew(page: Page) -> None:
    sent = requests(page)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="What is 17 + 25?").click()
    expect(last_answer(page).locator(".content")).to_have_text("17 + 25 = 42")
    ask(page, "What is 3 + 4?")
    expect(page.locator(".answer")).to_have_count(2)
    last_answer(page)
    roles = [[message["role"] for message in body["messages"]] for body in sent]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert sent[1]["messages"][2]["content"] == "17 + 25 = 42"
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".answer")).to_have_count(0)
    page.get_by_role("radio", name="Off").check()
    ask(page, "What is 3 + 4?")
    assert set(bars(last_answer(page))) == {1}
    assert len(sent[2]["messages"]) == 2 and sent[2]["speculative"] is False


@needs_browser
def test_thoughts_are_folded(page: Page) -> None:
    page.get_by_label("Think before answering").check()
    ask(page, "What is 17 + 25?")
    answer = last_answer(page)
    thought = answer.locator(".thinking .text")
    expect(answer.locator(".content")).to_have_text("17 + 25 = 42")
    expect(thought).to_be_hidden()
    answer.get_by_text(re.compile(r"Thinking, \d+ tokens")).click()
    expect(thought).to_be_visible()
    assert "10 + 20 = 30" in (thought.text_content() or "")


@needs_browser
@pytest.mark.parametrize("way", ["button", "key"])
def test_an_answer_can_be_stopped(page: Page, server: ServerProcess, way: str) -> None:
    def endless(route: Route) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/chat/completions", endless)
    page.get_by_label("Most tokens").fill("8000")
    ask(page, STORY)
    expect(page.locator(".answer .token").nth(5)).to_be_attached()
    page.get_by_role("button", name="Stop").click() if way == "button" else page.keyboard.press("Escape")
    assert (last_answer(page).locator(".figures").text_content() or "").endswith(" · stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    headers = {"Authorization": f"Bearer {KEY}"}
    info = f"{server.url}/server_info"
    wait_until(lambda: httpx.get(info, headers=headers).json()["num_pending_requests"] == 0, "the server to stop too")
    page.unroute("**/v1/chat/completions")
    ask(page, "What is 17 + 25?")
    expect(page.locator(".answer")).to_have_count(2)
    last_answer(page)


@needs_browser
def test_the_keyboard_is_enough(page: Page) -> None:
    page.get_by_label("API key").focus()
    for _ in range(6):  # the conversation, which scrolls, its four examples, the message
        page.keyboard.press("Tab")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("Spell the word")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("cloud.")
    assert page.get_by_label("Message").input_value() == "Spell the word\ncloud."
    page.keyboard.press("Enter")
    last_answer(page)
    expect(page.get_by_label("Message")).to_be_focused()
    page.get_by_role("radio", name="On").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("radio", name="Off")).to_be_checked()


@needs_browser
def test_what_goes_wrong_is_said(page: Page, log: PageLog) -> None:
    page.get_by_label("Most tokens").fill("100000")
    ask(page, "Hello")
    error = page.get_by_role("alert")
    expect(error).to_contain_text("max_tokens")
    enter_key(page, "wrong")
    expect(page.locator("#model")).to_have_text("enter the API key in the settings")
    page.get_by_label("Most tokens").fill("20")
    ask(page, "Hello")
    expect(error.last).to_have_text("the API key is wrong")
    expect(page.get_by_label("API key")).to_be_focused()
    # the browser tells of every status that is an error
    assert [problem for problem in log.problems if "400 (Bad Request)" not in problem] == [UNAUTHORIZED] * 2
    log.problems.clear()
    enter_key(page, KEY)
    expect(page.locator("#model")).to_contain_text("FROZEN_KV_MTP")


@needs_browser
def test_a_stream_that_breaks_is_an_error(page: Page) -> None:
    chunk = 'data: {"choices": [{"index": 0, "delta": {"content": "<b>Hi</b>"}, "accept_positions": [0]}]}\n\n'
    broken = [(chunk, "the stream ended before"), (chunk + 'data: {"error": {"message": "gone"}}\n\n', "gone")]
    for stream, message in broken:
        page.route("**/v1/chat/completions", partial(Route.fulfill, content_type="text/event-stream", body=stream))
        ask(page, "Hello")
        expect(page.get_by_role("alert").last).to_contain_text(message)
        # text is text, whatever it looks like
        assert page.locator(".answer .content").last.text_content() == "<b>Hi</b>"
        page.unroute("**/v1/chat/completions")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(page: Page, scheme: Any) -> None:
    def lightness() -> int:
        colour = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    page.emulate_media(color_scheme=scheme)
    before = lightness()
    assert (before > 600) == (scheme == "light") and (before < 150) == (scheme == "dark")
    page.get_by_role("button", name="Switch between light and dark").click()
    assert (lightness() > 600) == (scheme == "dark")
    page.get_by_role("button", name="Switch between light and dark").click()
    assert lightness() == before


@needs_browser
def test_a_phone_shows_all(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    expect(page.get_by_label("Temperature")).to_be_hidden()
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("radio", name="Compare").check()
    ask(page, STORY)
    expect(page.locator(".verdict")).to_be_in_viewport()
    expect(page.get_by_label("Temperature")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    on, off = (answer.bounding_box() for answer in page.locator(".answer").all())
    assert on is not None and off is not None and on["x"] == off["x"] and on["y"] + on["height"] <= off["y"]


def test_nothing_comes_from_elsewhere(server: ServerProcess) -> None:
    page = httpx.get(server.url)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    paths = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    assert len(paths) == len(re.findall(r"\b(?:href|src)\s*=", page.text)) > 3
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", page.text)
    modules = set()
    for path in paths:
        reply = httpx.get(f"{server.url}/{path}")
        assert reply.status_code == 200, path
        assert "://" not in reply.text.replace("http://www.w3.org/2000/svg", ""), path
        modules |= set(re.findall(r'from "\./([^"]+)"', reply.text))
    assert modules == {"answer.js", "api.js"}
    for path in ("/", *(f"/playground/{name}" for name in ("app.js", *modules))):
        headers = httpx.get(server.url + path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "*" not in policy
        assert "frame-ancestors 'none'" in policy and "script-src 'self';" in policy
        assert headers["x-content-type-options"] == "nosniff"


def test_only_the_page_is_open(server: ServerProcess) -> None:
    assert httpx.head(server.url).status_code == 200
    assert httpx.get(f"{server.url}/server_info").status_code == 401
    for path in ("/playground/nothing", "/playground/..%2f__init__.py", "/playground/"):
        assert httpx.get(server.url + path).status_code == 401
        assert httpx.get(server.url + path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 404
