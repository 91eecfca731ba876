"""The page as a browser shows it, on a phone and on a desk, by keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from envserve.errors import ConnectError
from envserve.page.app import build_app
from tests.envserve.page_client import served
from tests.envserve.page_fakes import FakeObserver, FakeServer

CHROMIUM = "/usr/bin/chromium"
EVIL = "<img src=x onerror=\"document.title='evil'\">"
AWAY = re.compile("away")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> dict[str, FakeServer]:
    num_envs = getattr(request, "param", 16)
    return {
        "tcp://sim1:5555": FakeServer("CartPole-v1", num_envs=num_envs),
        "tcp://sim2:5555": FakeServer(EVIL, num_envs=3, host="", has_pictures=False),
    }


@pytest.fixture
def url(servers: dict[str, FakeServer], tmp_path: Path) -> Iterator[str]:
    rows = [{"steps": 100 * k, "mean_return": 20.0 * k} for k in range(9)]
    rows[-1] |= {"evaluation_return": 170.0, "demo_wrong": 0, "demo_recovery_ms": 83}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    with served(
        lambda token: build_app(
            [*servers],
            run=tmp_path,
            token=token,
            buttons={"kill": ("Kill a worker", lambda: "Dead.")},
            observe=lambda address: FakeObserver(servers[address]),  # type: ignore
        )
    ) as url:
        yield url


@pytest.fixture(params=[360, 1280], ids=["phone", "desk"])
def page(chromium: Browser, url: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page, looked at; whatever the browser complains of is an error."""
    with chromium.new_context(
        viewport={"width": request.param, "height": 800}, accept_downloads=True
    ) as context:
        complaints: list[str] = []
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator(".tile").first).to_be_visible()
        yield page
        page.evaluate("source.close()")
        assert [text for text in complaints if "404" not in text] == []


def test_what_is_shown_fits_and_is_text(page: Page) -> None:
    assert "token" not in page.url
    expect(page.locator(".tile img:not([hidden])").first).to_be_visible()
    expect(page.locator("#numbers .good dd")).to_contain_text("0")
    expect(page.locator("#numbers")).to_contain_text("83 ms")
    expect(page.locator("#curve .mark")).to_have_count(1)
    expect(page.locator("#servers")).to_contain_text("2 worker died, 1 timeout")
    expect(page.locator("#envs")).to_contain_text(EVIL)
    expect(page.locator(".tile").last).to_be_attached()
    assert page.locator("#envs h2 img").count() == 0
    assert page.title() == "envserve"
    width = page.viewport_size
    assert width is not None
    assert page.evaluate("document.documentElement.scrollWidth") <= width["width"]


def test_an_env_that_renders_nothing_is_a_card(page: Page) -> None:
    card = page.locator(".tile").last
    card.scroll_into_view_if_needed()
    expect(card).to_contain_text("no picture: render_mode is None")
    assert card.locator("img").is_hidden()


def test_the_keyboard_is_enough(page: Page) -> None:
    def focused() -> str:
        return str(page.evaluate("document.activeElement.ariaLabel ?? ''"))

    for _ in range(10):
        page.keyboard.press("Tab")
        if focused().startswith("Env "):
            break
    assert focused().startswith("Env 0 of CartPole-v1: return ")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.press("ArrowRight")
    assert focused().startswith("Env 1 ")
    page.keyboard.press("ArrowDown")
    below = focused()
    assert not below.startswith("Env 1 ")
    page.keyboard.press("ArrowUp")
    assert focused().startswith("Env 1 ")
    page.keyboard.press("End")
    assert focused().startswith(f"Env 2 of {EVIL}")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    large = page.locator("dialog")
    expect(large).to_be_visible()
    expect(large).to_contain_text("Env 0 of CartPole-v1")
    expect(large).to_contain_text(str(2**60))
    page.keyboard.press("ArrowRight")
    expect(large).to_contain_text("Env 1 of CartPole-v1")
    page.keyboard.press("Escape")
    expect(large).to_be_hidden()
    # The browser first gives the focus back to where it was; the page's own word for it
    # comes a moment later.
    opened = page.get_by_role("button", name=re.compile("^Env 1 of CartPole-v1: "))
    expect(opened).to_be_focused()


def test_an_env_that_is_away_is_grey_and_says_how_long_it_took(
    page: Page, servers: dict[str, FakeServer]
) -> None:
    tile = page.locator(".tile").nth(4)
    expect(tile.locator("img")).to_be_visible()
    expect(page.locator("#curve")).to_be_visible()
    boxes = "[...document.querySelectorAll('.tile, .card')].map((each) => "
    boxes += "JSON.stringify(each.getBoundingClientRect()))"
    before = page.evaluate(boxes)
    server = servers["tcp://sim1:5555"]
    server.replace_lease(0, absent=(4, 5))
    expect(tile).to_have_class(AWAY)
    expect(tile).to_contain_text(AWAY)
    expect(page.locator(".tile").nth(3)).not_to_have_class(AWAY)
    assert page.evaluate(boxes) == before
    back = ((1, 4, 83), (2, 5, 83))
    server.replace_lease(0, absent=(), recoveries=back, num_recoveries=2)
    expect(tile).to_contain_text("back in 83 ms")
    expect(tile).not_to_have_class(AWAY)
    assert page.evaluate(boxes) == before


def test_a_server_that_goes_takes_its_envs_along_and_brings_them_back(
    page: Page, servers: dict[str, FakeServer]
) -> None:
    server = servers["tcp://sim1:5555"]
    server.error = ConnectError("no server answered within 2 s")
    expect(page.locator(".server").first).to_contain_text("sim1 is gone")
    expect(page.locator(".server").first).to_contain_text("no server answered")
    expect(page.locator(".tile").first).to_have_class(AWAY)
    server.error = None
    expect(page.locator(".server").first).to_contain_text("sim1 is up")
    expect(page.locator(".tile").first).to_contain_text("back in")


def test_a_lease_that_takes_the_place_of_another_keeps_its_tiles(
    page: Page, servers: dict[str, FakeServer]
) -> None:
    tile = page.locator(".tile").first
    server, count = servers["tcp://sim1:5555"], page.locator(".tile").count()
    server.replace_lease(0, number=9)
    expect(page.locator(".head", has_text="CartPole")).not_to_contain_text("ended")
    assert page.locator(".tile").count() == count
    server.ticks = 77
    expect(tile).to_contain_text("77")


def test_a_flight_record_is_downloaded(page: Page) -> None:
    page.locator(".tile").nth(2).click()
    with page.expect_download() as download:
        page.get_by_text("Download flight record").click()
    assert download.value.suggested_filename == "lease-1-env-2.repro"
    assert Path(download.value.path()).read_bytes() == b"record of 1 2"
    expect(page.locator("#hint")).to_contain_text("envserve replay lease-1-env-2")


def test_episodes_draw_themselves(page: Page, servers: dict[str, FakeServer]) -> None:
    servers["tcp://sim1:5555"].end_episodes(0, *range(300, 330))
    expect(page.locator("#episodes")).to_contain_text("last 30")
    expect(page.locator("#numbers")).to_contain_text("314.5")


def test_a_button_says_what_it_did(page: Page) -> None:
    page.get_by_role("button", name="Kill a worker").click()
    expect(page.locator("#toast")).to_have_text("Dead.")


@pytest.mark.parametrize("servers", [320], indirect=True)
def test_pictures_are_asked_for_while_their_tile_is_in_view(
    page: Page, servers: dict[str, FakeServer]
) -> None:
    server = servers["tcp://sim1:5555"]
    first, last = (page.locator(".tile").nth(place) for place in (1, 319))
    expect(first.locator("img")).to_be_visible()
    assert 319 not in {row for _, rows, _ in server.asked for row in rows}
    last.scroll_into_view_if_needed()
    expect(last.locator("img")).to_be_visible()
    server.asked.clear()
    server.ticks = 77
    expect(last).to_contain_text("77")
    assert 1 not in {row for _, rows, _ in server.asked for row in rows}


def test_a_page_left_open_says_that_it_is_of_another_start(
    chromium: Browser, servers: dict[str, FakeServer]
) -> None:
    def build(token: str):  # type: ignore[no-untyped-def]
        address = "tcp://sim1:5555"
        server = FakeObserver(servers[address])
        return build_app([address], run=None, token=token, observe=lambda _: server)  # type: ignore

    with chromium.new_context() as context:
        page = context.new_page()
        with served(build) as url:
            page.goto(url)
            expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#link")).to_contain_text("gone; trying again")
        port = int(url.rpartition(":")[2].partition("/")[0])
        with served(build, port) as again:
            assert f":{port}/" in again
            text = "open the address that the command prints"
            expect(page.locator("#link")).to_contain_text(text, timeout=30_000)


def test_a_server_that_tells_of_envs_without_end_fills_no_browser(
    page: Page, servers: dict[str, FakeServer]
) -> None:
    lying = next(iter(servers.values()))
    names = [str(number) for number in range(200)]
    lying.status = FakeServer(*names, num_envs=10**15).status
    lying.replace_lease(0, number=2**60)
    expect(page.locator(".lease")).to_have_count(128)
    expect(page.locator(".tile")).to_have_count(2048)
