"""The page in a headless Chromium: asking, stopping, keys, hostile text, no address but the server's, accessibility."""

import json
import os
import time
from pathlib import Path

import pytest

from bench.browser import Browser, chromium
from tests.serving.conftest import Echo

# `!` stands for a script that would show.
PAYLOADS = [
    payload.replace("!", "pwned=1")
    for payload in (
        "<script>!</script>",
        '<img src=x onerror="!">',
        "<svg onload=!>",
        "<svg><script>!</script></svg>",
        "<body onload=!>",
        "<iframe src=javascript:!>",
        '<iframe srcdoc="<script>parent.!</script>">',
        "<a href=javascript:!>x</a>",
        "javascript:!",
        "<input autofocus onfocus=!>",
        "<details open ontoggle=!>",
        "<video><source onerror=!></video>",
        "<audio src=x onerror=!>",
        "<marquee onstart=!>",
        "<object data=javascript:!>",
        "<embed src=javascript:!>",
        "<math><mtext></form><form><mglyph><style></math><img src onerror=!>",
        "<style>@import 'https://evil.example'</style>",
        "<link rel=stylesheet href=https://evil.example/x.css>",
        "<meta http-equiv=refresh content='0;url=https://evil.example'>",
        "<base href=https://evil.example/>",
        "<form action=https://evil.example><button>x",
        "</p></div></main><script>!</script>",
        "</title><script>!</script>",
        "</script><script>!</script>",
        "--><script>!</script>",
        "]]><script>!</script>",
        "'\"><script>!</script>",
        '" onmouseover=! x="',
        "';!;//",
        "\\';!;//",
        "${!}",
        "{{constructor.constructor('!')()}}",
        "%3Cscript%3E!%3C/script%3E",
        "&lt;script&gt;!&lt;/script&gt;",
        "&#60;script&#62;!&#60;/script&#62;",
        "\\u003cscript\\u003e!\\u003c/script\\u003e",
        "<scr\0ipt>!</scr\0ipt>",
        "<ScRiPt>!</sCrIpT>",
        'data: {"type":"done"}\n\ndata: {"type":"error","message":"<img src=x onerror=!>"}\n\n',
        "[x](javascript:!) ![x](https://evil.example/x.png)",
        "\u202e\u2066<img src=x onerror=!>\u2069",
    )
]
# What the page is made of where it shows what was asked and answered.
TAGS = {"ARTICLE", "SECTION", "DIV", "H2", "H3", "P", "OL", "UL", "LI", "SPAN", "B", "I", "Q"}
TAGS |= {"BUTTON", "DETAILS", "SUMMARY"}


FROM_MEMORY = "From memory?"


class SearchingEcho(Echo):
    """Searches once, but for FROM_MEMORY: the question's text is analysis, query, document and answer."""

    def iterate(self):
        for job in self.jobs:
            text = job["ask"].text
            if not job["said"] and job["tell"] and job["ask"].mode != "chat" and text != FROM_MEMORY:
                job["tell"]({"type": "text", "text": text, "step": 1, "analysis": text, "query": text, "answer": None})
                hits = [{"number": 1, "id": text, "title": text, "text": text, "cited": True}]
                job["tell"](
                    {"type": "step", "number": 1, "analysis": text, "query": text, "documents": hits, "answer": None}
                    | {"sources": [1], "faults": [], "failed": False}
                )
        return super().iterate()

    def answer(self, job):
        answer, text = super().answer(job), job["ask"].text
        if job["ask"].mode == "chat" or job["left"] or text == FROM_MEMORY:
            return answer
        answer.sources.append({"number": 1, "id": text, "title": text, "text": text, "cited": True})
        return answer


@pytest.fixture(scope="module")
def browser():
    path = chromium()
    if path is None:
        pytest.skip("needs a Chromium on the PATH")
    with Browser(path) as browser:
        yield browser


@pytest.fixture
def page(serving, browser, monkeypatch):
    monkeypatch.setattr("tests.serving.conftest.Echo", SearchingEcho)
    running = serving()
    for log in (browser.requests, browser.dialogs, browser.errors):
        log.clear()

    def load(width=1000, height=800, dark=False):
        browser.view(width, height, dark)
        browser.open(running.url)
        browser.wait("document.querySelectorAll('#adapter option').length > 2")
        return running

    yield load
    assert browser.errors == [] and browser.dialogs == []
    assert all(url.startswith((running.url, "data:", "blob:")) for url in browser.requests), browser.requests


def ask(browser, text, mode="search", wait=True):
    browser.run(f"document.querySelector('[name=mode][value={mode}]').click(); $('query').focus()")
    browser.type(text)
    browser.press("Enter")
    if wait:
        browser.wait("running === null && turns.length && turns.at(-1).state !== 'waiting'")


def texts_of(browser, selector):
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)")


def press_tool(browser, text):
    browser.run(
        f"[...document.querySelectorAll('.tools button')].find((b) => b.innerText === {json.dumps(text)}).click()"
    )


def test_a_question_its_steps_its_documents_and_its_answer(browser, page):
    running = page()
    ask(browser, "Who wrote it?")
    assert texts_of(browser, ".question") == ["Who wrote it?"]
    assert texts_of(browser, ".answer .text") == ["Who wrote it?"]
    assert texts_of(browser, ".query q") == ["Who wrote it?"] and texts_of(browser, ".doc b") == ["1Who wrote it?"]
    assert texts_of(browser, ".meta") == ["Search Mode, rl"]
    browser.run("document.querySelector('.sources button').click()")
    assert browser.run("document.querySelector('.doc').open && document.activeElement.tagName === 'SUMMARY'")
    ask(browser, "hello there", "auto")
    assert texts_of(browser, ".answer.plain .text") == ["hello there"]
    assert texts_of(browser, ".meta")[1] == "Fast Chat, sft"
    assert [a.mode for a in running.answering.asks] == ["search", "chat"]
    assert [m["content"] for m in running.answering.asks[1].earlier] == ["Who wrote it?"] * 2
    assert browser.run("performance.getEntriesByType('paint')[0].startTime") < 1000


def test_an_answer_of_search_mode_without_a_document_says_so(browser, page):
    page()
    for text, mode, notes in (
        ("Who wrote it?", "search", []),
        (FROM_MEMORY, "search", ["The model read no document."]),
        ("hello there", "chat", []),
    ):
        ask(browser, text, mode)
        assert browser.run("[...turns.at(-1).box.querySelectorAll('.note')].map((e) => e.innerText)") == notes


def test_stop_retry_copy_export_and_clear(browser, page):
    running = page()
    running.answering.slow = 0.05
    ask(browser, "word " * 100, "chat", wait=False)
    browser.wait("document.querySelector('.answer .text')")
    browser.press("Escape")
    browser.wait("running === null")
    assert texts_of(browser, ".problem") == [] and texts_of(browser, ".turn .note") == ["Stopped."]
    assert 0 < len(texts_of(browser, ".answer .text")[0]) < 400
    running.answering.slow = 0.002
    press_tool(browser, "Retry")
    browser.wait("running === null && turns.at(-1).state === 'done'")
    assert texts_of(browser, ".turn .note") == [] and texts_of(browser, ".answer .text")[0].count("word") == 100
    browser.run("document.execCommand = () => { copied = document.activeElement.value; return true; }")
    browser.run("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })")
    browser.run("document.querySelector('.tools button').click()")
    browser.wait("document.querySelector('.tools button').innerText === 'Copied'")
    assert browser.run("copied").count("word") == 100
    browser.run("URL.createObjectURL = (blob) => { exported = blob; return '#'; }; $('export').click()")
    text = browser.run("exported.text()")
    assert text.startswith("# Conversation\n\n## word word") and "Fast Chat" in text
    conversation = browser.run("conversation")
    browser.run("$('clear').click()")
    assert texts_of(browser, ".turn") == [] and browser.run("conversation") != conversation
    assert browser.run("!$('welcome').hidden && $('clear').disabled && document.activeElement === $('query')")


def test_a_retry_after_a_stopped_retry_replaces_the_answer_too(browser, page):
    """It was sent as a new turn: the server then remembered the question twice."""
    running = page()
    running.answering.slow = 0.05
    ask(browser, "word " * 20, "chat")
    press_tool(browser, "Try again")
    browser.wait("running !== null && document.querySelector('.answer .text')")
    browser.press("Escape")
    browser.wait("running === null")
    running.answering.slow = 0.002
    press_tool(browser, "Retry")
    browser.wait("running === null && turns.at(-1).state === 'done'")
    assert [a.retry for a in running.answering.asks] == [False, True, True]
    assert [a.earlier for a in running.answering.asks] == [(), (), ()]
    ask(browser, "next", "chat")
    assert len(running.answering.asks[-1].earlier) == 2


def test_a_retry_of_an_earlier_turn_is_a_new_turn(browser, page):
    running = page()
    for question in ("one", "two"):
        ask(browser, question, "chat")
    press_tool(browser, "Try again")  # of the first turn
    browser.wait("running === null && turns[0].state === 'done'")
    assert [a.retry for a in running.answering.asks] == [False, False, False]
    press_tool(browser, "Try again")  # now the server remembers the first turn last
    browser.wait("running === null && turns[0].state === 'done'")
    assert running.answering.asks[-1].retry
    assert [m["content"] for m in running.answering.asks[-1].earlier] == ["one", "one", "two", "two"]


def test_a_token_is_sent_where_the_browser_has_no_storage(browser, serving):
    """It was read from sessionStorage alone: without it, each question asked for the token again, and failed."""
    running = serving(token="secret")
    browser.open("about:blank")
    script = "delete window.sessionStorage; Object.defineProperty(window, 'sessionStorage', {get() { throw Error(); }})"
    blocked = browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    browser.open(running.url)
    browser.wait("$('tokendialog').open")
    browser.run("$('token').value = 'secret'; document.querySelector('#tokendialog .go').click()")
    browser.wait("!$('served').hidden")
    ask(browser, "hello there", "chat")
    assert texts_of(browser, ".answer .text") == ["hello there"]
    assert not browser.run("$('tokendialog').open")
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=blocked["identifier"])


def test_errors_are_words_for_people(browser, page):
    running = page()
    ask(browser, "x " * 2000)
    assert texts_of(browser, ".problem") == ["The question is too long for this model."]
    ask(browser, "crash")
    assert texts_of(browser, ".problem")[1] == "Internal error. See the server's log."
    running.desk.places.limit = 0
    ask(browser, "full")
    assert texts_of(browser, ".problem")[2] == "The server is busy. Try again soon."
    assert browser.run("[...document.querySelectorAll('.problem')].every((e) => e.getAttribute('role') === 'alert')")
    browser.errors.clear()  # Chromium's own lines about the statuses


def test_forty_hostile_texts_do_nothing(browser, page):
    assert len(PAYLOADS) >= 40
    page()
    for payload in PAYLOADS:
        browser.run(f"run(addTurn({json.dumps(payload)}, 'search', ''), false)")
    assert browser.run("turns.length") == len(PAYLOADS)
    browser.wait("document.querySelectorAll('.answer .sources, .problem').length === turns.length")
    browser.run("for (const doc of document.querySelectorAll('.doc')) doc.open = true; $('export').click()")
    time.sleep(0.2)
    assert browser.run("typeof pwned") == "undefined"
    used = set(browser.run("[...document.querySelectorAll('#turns *')].map((e) => e.tagName)"))
    assert used <= TAGS
    texts = browser.run("[...document.querySelectorAll('.doc > p:not(.id)')].map((e) => e.textContent)")
    assert sorted(texts) == sorted(PAYLOADS)


def test_keys_themes_and_widths(browser, page):
    page(dark=True)
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    browser.run("$('theme').click()")
    assert browser.run("document.documentElement.dataset.theme") == "light"
    browser.run("localStorage.clear(); document.querySelector('[name=mode]').focus()")
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('[name=mode]:checked').value") == "chat"
    browser.run("$('query').focus()")
    browser.type("one")
    browser.press("Enter", modifiers=8)
    browser.type("two")
    assert browser.run("$('query').value") == "one\ntwo" and browser.run("turns.length") == 0
    for width in (320, 390, 768, 1400):
        page(width)
        ask(browser, "Who wrote " + "Averylongwordwithoutanyspace" * 8)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), width


def test_what_is_served_is_named_and_what_was_not_learned_is_not_offered(browser, page):
    """Deep Reasoning answered `Ten`, and on a phone the button to ask stood in a row of its own."""
    running = page()
    del running.answering.modes["reasoning"]
    running.answering.notes["search"] = "Plain RAG"
    running.answering.about["examples"] = ["Who wrote it?", "<b>Where?</b>"]
    page(390)
    browser.wait("!$('served').hidden")
    assert texts_of(browser, "#served dd") == ["tiny", "sft, rl", "notes"]
    visible = "[...document.querySelectorAll('{}')].filter((e) => e.offsetParent).map((e) => e.innerText.trim())"
    assert browser.run(visible.format(".mode")) == ["Auto", "Chat", "Search"]
    kinds = browser.run(visible.format(".kinds li"))
    assert [kind.split() for kind in kinds] == [
        ["Fast", "Chat", "An", "answer", "at", "once."],
        ["Search", "Mode", "Plain", "RAG."],
    ]
    middle = "((e) => e.getBoundingClientRect().top + e.getBoundingClientRect().height / 2)"
    assert abs(browser.run(f"{middle}($('go')) - {middle}($('modes'))")) < 3
    browser.run("document.querySelector('[name=mode][value=search]').click()")
    browser.run("document.querySelectorAll('.examples button')[1].click()")
    browser.wait("running === null && turns.length && turns.at(-1).state !== 'waiting'")
    assert texts_of(browser, ".question") == ["<b>Where?</b>"]
    assert texts_of(browser, ".meta") == ["Search Mode, rl. Plain RAG."]


def axe():
    """axe-core's script, by R3LITE_AXE or from a node_modules of this folder."""
    places = [os.environ.get("R3LITE_AXE", ""), "node_modules/axe-core/axe.min.js"]
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


@pytest.mark.parametrize(("width", "dark"), [(1000, False), (1000, True), (390, False)])
def test_axe_finds_nothing_serious(browser, page, width, dark):
    if axe() is None:
        pytest.skip("needs axe-core: npm install axe-core, or R3LITE_AXE=.../axe.min.js")
    running = page(width, dark=dark)
    browser.run(axe().read_text(encoding="utf-8") + ";0")
    for state in ("empty", "answered", "failed"):
        if state == "answered":
            ask(browser, "Who wrote it?")
            browser.run("document.querySelector('.doc').open = true")
        if state == "failed":
            running.desk.places.limit = 0
            ask(browser, "full")
        violations = browser.run("axe.run().then((r) => r.violations.map((v) => [v.impact, v.id, v.nodes[0].html]))")
        assert [v for v in violations if v[0] in ("serious", "critical")] == [], (state, violations)
    browser.errors.clear()
