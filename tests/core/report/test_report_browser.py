"""The report in a real browser: complete, quiet, and no wider than a phone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser

from fedpriv.core.report import write_report

pytestmark = pytest.mark.slow

MakeRun = Callable[..., Path]

RUNS: dict[str, dict[str, Any]] = {
    "usual": {},
    "many": {"clients": 100, "victims": 16, "failures": tuple((1, client, "x" * 300) for client in range(30))},
    "words": {"title": "Donaudampfschifffahrtsgesellschaft" * 3, "reason": "/a/long/path" * 30, "status": "failed"},
}
OPEN = "document.querySelectorAll('details').forEach(one => one.open = true)"
BROKEN = "[...document.images].filter(i => !(i.complete && i.naturalWidth > 0 && i.clientWidth > 0)).map(i => i.alt)"
WIDE = """
[...document.querySelectorAll('body *')]
  .filter(one => one.getBoundingClientRect().right > WIDTH + 0.5 && !one.closest('.scroller > *, pre > *'))
  .map(one => one.outerHTML.slice(0, 80))
"""
SOURCES = """
[...document.querySelectorAll('picture')]
  .map(p => [p.querySelector('img').currentSrc, p.querySelector('source').srcset, p.querySelector('img').src])
"""
SHOTS = """
[...document.querySelectorAll('.shot img')]
  .map(i => [i.clientWidth, i.clientHeight, getComputedStyle(i).imageRendering])
"""


@pytest.mark.parametrize("name", RUNS)
def test_the_page_is_shown_whole_and_without_complaint(make_run: MakeRun, browser: Browser, name: str) -> None:
    path = write_report(make_run(**RUNS[name]))
    for width in (360, 1200):
        for scheme in ("light", "dark"):
            browser.open(path, width, scheme)
            browser.evaluate(OPEN)
            assert browser.evaluate("innerWidth") == width
            assert browser.evaluate("document.images.length") > 20
            assert browser.evaluate(BROKEN) == []
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(WIDE.replace("WIDTH", str(width))) == []
            assert browser.complaints() == []
            assert browser.requests() == [path.resolve().as_uri()]


@pytest.mark.parametrize(("scheme", "background"), [("light", "rgb(247, 247, 244)"), ("dark", "rgb(16, 19, 22)")])
def test_plots_and_page_follow_the_colour_scheme(
    make_run: MakeRun, browser: Browser, scheme: str, background: str
) -> None:
    browser.open(write_report(make_run()), 1200, scheme)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == background
    plots = browser.evaluate(SOURCES)
    assert len(plots) == 4
    for shown, in_the_dark, in_the_light in plots:
        assert in_the_dark != in_the_light
        assert shown == (in_the_dark if scheme == "dark" else in_the_light)


def test_small_pictures_are_shown_large_and_unblurred(make_run: MakeRun, browser: Browser) -> None:
    browser.open(write_report(make_run()), 360, "light")
    shots = browser.evaluate(SHOTS)
    assert len(shots) == 24
    for width, height, rendering in shots:
        assert width >= 120
        assert width == height
        assert rendering == "pixelated"


def test_a_policy_forbids_every_load(make_run: MakeRun, browser: Browser) -> None:
    path = write_report(make_run())
    text = path.read_text(encoding="utf-8")
    intruders = "<script>document.title = 'ran'</script><img src='file:///x.png' alt='x'></main>"
    path.write_text(text.replace("</main>", intruders), encoding="utf-8")
    browser.open(path, 1200, "light")
    assert browser.evaluate("document.title") != "ran"
    assert len([text for text in browser.complaints() if "Content Security Policy" in text]) == 2


def test_it_prints(make_run: MakeRun, browser: Browser) -> None:
    browser.open(write_report(make_run()), 1200, "dark")
    assert browser.pdf().startswith(b"%PDF")
