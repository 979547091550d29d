"""The chat page in headless Chromium, by real clicks and keys, over a scripted model.

RELAXPACK_SCREENSHOTS=DIR keeps pictures of the page in light, dark and mobile width, to be looked at.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relaxpack.runtime.server.serve import Running, background
from tests.helpers.browser import chromium
from tests.helpers.server import gate_of, hash_model, last_question, scripted_model
from tests.helpers.waiting import DEADLINE, eventually

MARKDOWN = """Here is a **function**, with `slicing`:

```python
def reverse(text):
    return text[::-1]  # <b>not bold</b>
```

1. first
2. second
   - nested

| in | out |
|---|---|
| abc | cba |

<img src=x onerror="document.title='hacked'"> [a link](https://example.com/x) [bad](javascript:alert(1))"""


def reply(prompt: str) -> str:
    question = last_question(prompt)
    if question == "code":
        return MARKDOWN
    if question == "long":
        return "word " * 150
    return f"You said: {question}" + (" as a pirate" if "pirate" in prompt.partition("user\n")[0] else "")


class Page:
    """What a person does and sees."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url
        driver.get(url + "/")
        self.wait(lambda: self.text("#model") != "…")

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        """Of the last one."""
        found = self.all(selector)
        return found[-1].get_property("innerText").strip() if found else ""

    def wait(self, check: Callable[[], Any], seconds: float = DEADLINE) -> None:
        from selenium.common.exceptions import StaleElementReferenceException

        deadline = time.monotonic() + seconds
        while True:
            try:
                if check():
                    return
            except StaleElementReferenceException:      # drawn anew while we looked
                pass
            assert time.monotonic() < deadline, f"the page never came to it; it shows: {self.text('body')}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.find("#input").send_keys(text)

    @property
    def busy(self) -> bool:
        return "busy-now" in self.find("body").get_attribute("class").split()

    def ask(self, text: str) -> str:
        """By the keyboard; the finished answer."""
        self.type(text + "\n")
        self.wait(lambda: not self.busy and self.text(".message:last-child .meta"))
        return self.text(".answer")

    def save_settings(self) -> None:
        """Saved by an event that comes a little after the click."""
        self.driver.execute_script("window.saved = false; document.querySelector('#settings').addEventListener("
                                   "'close', () => { window.saved = true; }, {once: true})")
        self.find("#save-settings").click()
        self.wait(lambda: self.driver.execute_script("return window.saved"))

    def picture(self, name: str) -> None:
        if folder := os.environ.get("RELAXPACK_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with background(scripted_model(reply, delay=0.004, name="scripted-model")) as running:
        yield running


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as session:
        yield session


@pytest.fixture
def page(server: Running, driver: Any) -> Iterator[Page]:
    """The page as somebody sees it who has never been here."""
    driver.get(server.url + "/health")
    driver.execute_script("localStorage.clear()")
    driver.get_log("browser")
    yield Page(driver, server.url)
    problems = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert not problems


def test_a_conversation_by_keyboard_and_click(page):
    assert page.text("#model") == "scripted-model" and "What would you like to know?" in page.text("#messages")
    assert page.driver.switch_to.active_element.get_attribute("id") == "input"
    assert not page.find("#send").is_enabled()
    assert page.ask("hello") == "You said: hello"
    page.type("by click")
    page.find("#send").click()
    page.wait(lambda: page.text(".answer") == "You said: by click" and not page.busy)
    assert [node.text for node in page.all(".user .body")] == ["hello", "by click"]
    facts = page.text(".facts")
    assert "tokens/s" in facts and "prompt tokens cached" in facts and "first in" in facts
    assert not facts.startswith("0 ") and " · 0 of" not in facts      # the second turn found the first in the cache


def test_shift_enter_makes_a_line_and_suggestions_ask(page):
    from selenium.webdriver.common.keys import Keys

    page.find("#input").send_keys("one" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "two" + Keys.ENTER)
    page.wait(lambda: page.text(".user .body") == "one\ntwo" and not page.busy)
    page.find("#new-chat").click()
    page.find(".suggestions button").click()
    page.wait(lambda: "three sentences" in page.text(".answer") and not page.busy)


def test_an_answer_streams_and_stops_by_button_and_by_escape(page, server):
    from selenium.webdriver.common.keys import Keys

    aborted = itertools.count(server.state.model.engine.metrics.finished.get("abort", 0) + 1)
    metrics = server.state.model.engine.metrics
    for stop in (lambda: page.find("#send").click(), lambda: page.find("#input").send_keys(Keys.ESCAPE)):
        with gate_of(server.state.model).held(100) as gate:     # the answer comes to its tenth word or so and stays there
            page.type("long\n")
            eventually(lambda: gate.holds)
            page.wait(lambda: page.text(".message:last-child .answer").count("word") > 5)
            assert page.busy and page.find("#send").get_attribute("aria-label") == "Stop"
            stop()
            page.wait(lambda: not page.busy)
            assert re.fullmatch(r"stopped · \d+\.\d tokens/s", page.text(".facts"))
            assert page.text(".answer").count("word") < 150
            eventually(lambda: server.state.model.engine._commands)     # the news is at the engine, which is in a step
        eventually(lambda: metrics.running == 0)        # the server stopped too
        assert metrics.finished["abort"] == next(aborted)
    assert page.ask("and on") == "You said: and on"


def test_regenerate_and_edit(page):
    page.ask("first")
    page.ask("second")
    page.find(".message:last-child .again").click()
    page.wait(lambda: not page.busy and page.text(".message:last-child .meta"))
    assert len(page.all(".answer")) == 2 and page.text(".answer") == "You said: second"
    assert len(page.all(".again")) == 1
    page.driver.execute_script("arguments[0].scrollIntoView()", page.find(".user .edit"))
    page.find(".user .edit").click()
    assert page.find("#input").get_property("value") == "first" and not page.all(".message")
    page.find("#input").clear()
    assert page.ask("third") == "You said: third"


def test_settings_reach_the_server_and_are_kept(page):
    page.find("#open-settings").click()
    assert page.find("#set-temperature").get_attribute("placeholder") == "0.6"     # nobody advises another one
    page.find("#set-system").send_keys("Talk like a pirate.")
    page.find("#set-max_tokens").send_keys("400")
    page.find("#set-temperature").send_keys("0.2")
    page.save_settings()
    assert page.ask("ahoy") == "You said: ahoy as a pirate" and "pirate" in page.text(".system .body")
    page.find("#open-settings").click()
    page.find("#set-max_tokens").clear()
    page.find("#set-max_tokens").send_keys("3")
    page.save_settings()
    page.ask("again")
    assert page.text(".facts").startswith("3 tokens") and "cut off" in page.text(".facts")
    page.driver.refresh()
    page.wait(lambda: len(page.all(".answer")) == 2)
    page.find("#open-settings").click()
    assert page.find("#set-max_tokens").get_property("value") == "3"
    assert page.find("#set-system").get_property("value") == "Talk like a pirate."
    page.find("#reset-settings").click()
    page.save_settings()
    assert page.ask("plain") == "You said: plain"


def test_several_conversations_are_kept_in_the_browser(page, server):
    page.ask("about cats")
    page.find("#new-chat").click()
    page.ask("about dogs")
    titles = [row.text for row in page.all("#conversations .open")]
    assert titles == ["about dogs", "about cats"]
    page.all("#conversations .open")[1].click()
    assert page.text(".answer") == "You said: about cats"
    page.driver.refresh()
    page.wait(lambda: page.text(".answer") == "You said: about cats")
    with gate_of(server.state.model).held(100):
        page.type("long\n")                           # one goes on while another one is read
        page.all("#conversations .open")[0].click()
        assert page.text(".answer") == "You said: about dogs" and not page.busy
        assert len(page.all("#conversations .busy")) == 1
    page.wait(lambda: not page.all("#conversations .busy"))
    page.all("#conversations .open")[1].click()
    assert page.text(".answer").count("word") == 150
    page.find("#conversations li.current .remove").click()
    page.wait(lambda: [row.text for row in page.all("#conversations .open")] == ["about dogs"])
    assert "What would you like to know?" in page.text("#messages")


def test_code_lists_and_tables_are_shown_and_nothing_runs(page):
    page.ask("code")
    assert page.text(".answer figcaption span") == "python"
    assert page.text(".answer pre code") == "def reverse(text):\n    return text[::-1]  # <b>not bold</b>"
    assert [item.text for item in page.all(".answer ol > li")] == ["first", "second\nnested"]
    assert [cell.text for cell in page.all(".answer td")] == ["abc", "cba"] and page.text(".answer strong") == "function"
    assert not page.all(".answer img, .answer b") and "hacked" not in page.driver.title
    assert [link.get_attribute("href") for link in page.all(".answer a")] == ["https://example.com/x"]
    assert '<img src=x' in page.text(".answer") and "[bad](javascript:alert(1))" in page.text(".answer")
    # The button says so for a second only, which a slow machine may miss.
    page.driver.execute_script("const button = document.querySelector('.copy-code'); window.said = [];"
                               "new MutationObserver(() => window.said.push(button.textContent)).observe("
                               "button, {childList: true, characterData: true, subtree: true})")
    page.find(".copy-code").click()
    page.wait(lambda: "Copied" in page.driver.execute_script("return window.said"))


def test_errors_are_shown_and_can_be_tried_again(page, server):
    runner = server.state.model.engine.call(lambda engine: engine.runner).result(DEADLINE)
    whole = runner.forward

    def broken(plan: Any) -> Any:
        runner.forward = whole
        raise RuntimeError("out of luck")
    runner.forward = broken
    page.type("hello\n")
    page.wait(lambda: "out of luck" in page.text(".error"))
    page.find(".again").click()
    page.wait(lambda: page.text(".answer") == "You said: hello" and not page.all(".error"))
    page.driver.get_log("browser")      # the 500 is logged by the browser itself


def test_an_api_key_is_asked_for_and_used():
    with background(scripted_model(reply), api_keys=["open sesame"]) as server, chromium() as driver:
        page = Page(driver, server.url)
        assert "API key" in page.text("#model")
        page.find("#open-settings").click()
        page.find("#set-key").send_keys("open sesame")
        page.save_settings()
        page.wait(lambda: page.text("#model") == "scripted")
        assert page.ask("hello") == "You said: hello"


def test_a_model_that_does_not_chat_says_so():
    with background(hash_model(generates=False)) as server, chromium() as driver:
        page = Page(driver, server.url)
        page.wait(lambda: "This model does not chat" in page.text("#messages"))
        assert "/v1/embeddings" in page.text("#messages") and not page.find("#input").is_enabled()


def test_keys_open_and_close_things(page):
    from selenium.webdriver.common.keys import Keys

    page.ask("one")
    page.find("body").send_keys(Keys.ALT + "n")
    page.wait(lambda: "What would you like to know?" in page.text("#messages"))
    page.find("body").send_keys(Keys.ALT + "s")
    assert page.find("#settings").is_displayed()
    page.find("#set-system").send_keys(Keys.ESCAPE)
    page.wait(lambda: not page.find("#settings").is_displayed())
    page.find("#new-chat").click()
    page.find("#messages").click()
    page.find("body").send_keys("/")
    assert page.driver.switch_to.active_element.get_attribute("id") == "input"


@pytest.mark.parametrize("dark", [False, True])
def test_themes_have_readable_contrast(server, dark):
    with chromium(dark=dark) as driver:
        page = Page(driver, server.url)
        page.picture(f"welcome-{'dark' if dark else 'light'}")
        page.ask("code")
        page.picture(f"answer-{'dark' if dark else 'light'}")
        colours = json.loads(driver.execute_script(
            "const c = s => getComputedStyle(document.querySelector(s));"
            "return JSON.stringify({page: c('body').backgroundColor, text: c('body').color, muted: c('.facts').color,"
            "link: c('.answer a').color})"))
        light = {name: luminance(value) for name, value in colours.items()}
        assert (light["page"] < 0.1) == dark
        for name in ("text", "muted", "link"):
            low, high = sorted((light["page"], light[name]))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, colours)      # WCAG AA
        page.find("#open-settings").click()
        page.picture(f"settings-{'dark' if dark else 'light'}")
        page.save_settings()
        page.find("#theme").click()
        page.find("#theme").click()
        assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_phone_has_everything_within_its_width(server):
    with chromium(mobile=True) as driver:
        page = Page(driver, server.url)
        page.picture("welcome-mobile")
        page.ask("code")
        page.picture("answer-mobile")
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= 390
        assert not page.find("#new-chat").is_displayed()
        page.find("#open-sidebar").click()
        page.wait(lambda: page.find("#new-chat").is_displayed())
        page.picture("sidebar-mobile")
        page.find("#new-chat").click()
        page.wait(lambda: "What would you like to know?" in page.text("#messages"))
        page.wait(lambda: not page.find("#new-chat").is_displayed())
        page.find("#open-settings").click()
        page.picture("settings-mobile")
        box = page.find("#settings").rect
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
