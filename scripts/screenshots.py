"""Draw docs/images/playground-*.png: a server with the shipped pair, its page in a headless Chromium.

python scripts/screenshots.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test"))

from fixtures.browser import INSTALL, chromium, find_chromium  # noqa: E402
from fixtures.server_process import ready_server  # noqa: E402

FOLDER = ROOT / "docs" / "images"
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 780}


def open_page(browser: Browser, url: str, scheme: str, size: dict[str, int], scale: float) -> Page:
    context = browser.new_context(color_scheme=scheme, viewport=size, device_scale_factor=scale)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("FROZEN_KV_MTP")
    return page


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=60_000)


def chat(page: Page) -> None:
    page.get_by_label("Think before answering").check()
    ask(page, "What is 17 + 25?")
    page.locator(".thinking summary").click()
    page.get_by_label("Think before answering").uncheck()
    ask(page, "Tell me a story about a fox.")


def compare(page: Page) -> None:
    page.get_by_role("radio", name="Compare").check()
    ask(page, "Tell me a story about a bear.")


def phone(page: Page) -> None:
    ask(page, "Tell me a story about a fox.")


PICTURES = (
    ("light", "light", DESKTOP, 1.5, chat),
    ("dark", "dark", DESKTOP, 1.5, chat),
    ("compare", "light", DESKTOP, 1.5, compare),
    ("phone", "dark", PHONE, 2, phone),
)


def main() -> int:
    path = find_chromium()
    if path is None:
        print(f"error: {INSTALL}", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    arguments = ("--speculative-algorithm", "FROZEN_KV_MTP")
    with tempfile.TemporaryDirectory() as folder, ready_server(Path(folder), *arguments) as server:
        with chromium(path) as browser:
            for name, scheme, size, scale, act in PICTURES:
                page = open_page(browser, server.url, scheme, size, scale)
                act(page)
                page.get_by_label("Message").blur()
                page.screenshot(path=FOLDER / f"playground-{name}.png", animations="disabled")
                page.context.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
