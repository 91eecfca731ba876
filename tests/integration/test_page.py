"""The page in a real browser: phone and desktop layout, keyboard, live updates."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from envserve.errors import ConnectError
from envserve.monitoring.page.app import build_app
from envserve.monitoring.page.data_feed import DataFeed
from tests.envserve.page_client import served
from tests.envserve.page_fakes import FakeObserver, FakeServerState

CHROMIUM = "/usr/bin/chromium"
EVIL = "<img src=x onerror=\"document.title='evil'\">"
ABSENT = re.compile("absent")
#: Timeout in milliseconds; long, because a busy machine renders slowly.
PATIENCE = 60_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> dict[str, FakeServerState]:
    num_envs = getattr(request, "param", 16)
    return {
        "tcp://sim1:5555": FakeServerState("CartPole-v1", num_envs=num_envs),
        "tcp://sim2:5555": FakeServerState(EVIL, num_envs=3, host="", has_images=False),
    }


@pytest.fixture
def url(servers: dict[str, FakeServerState], tmp_path: Path) -> Iterator[str]:
    rows = [{"steps": 100 * k, "mean_return": 20.0 * k} for k in range(9)]
    rows[-1] |= {"evaluation_return": 170.0, "rows_checked": 334112, "rows_lost": 24}
    rows[-1] |= {"demo_wrong": 0, "demo_faults": 4, "demo_recovery_ms Kill it": 83}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    observe = cast(Any, lambda address: FakeObserver(servers[address]))
    feed = DataFeed([*servers], tmp_path, observe)

    def kill() -> str:
        servers["tcp://sim2:5555"].replace_lease(0, absent=(2,))
        return "Dead."

    buttons = {"kill": ("Kill a worker", kill)}
    with served(lambda token: build_app(feed, token=token, buttons=buttons)) as url:
        yield url


@pytest.fixture(params=[360, 1280], ids=["phone", "desk"])
def page(
    chromium: Browser,
    servers: dict[str, FakeServerState],
    url: str,
    request: pytest.FixtureRequest,
) -> Iterator[Page]:
    """The open page; browser warnings and errors fail the test.

    The data of the servers and the run arrives in any order, so wait until all of it
    is rendered.
    """
    num_tiles = sum(each.status.leases[0].num_envs for each in servers.values())
    with chromium.new_context(
        viewport={"width": request.param, "height": 800}, accept_downloads=True
    ) as context:
        context.set_default_timeout(PATIENCE)
        complaints: list[str] = []
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator(".server .soft:not(:empty)")).to_have_count(len(servers))
        expect(page.locator(".tile[aria-label]")).to_have_count(num_tiles)
        expect(page.locator("#curve .mark")).to_have_count(1)
        yield page
        page.evaluate("source.close()")
        assert [text for text in complaints if "404" not in text] == []


def test_the_page_fits_the_screen_and_contains_text(page: Page) -> None:
    expect(page).not_to_have_url(re.compile("token"))
    expect(page.locator(".tile img:not([hidden])").first).to_be_visible()
    expect(page.locator("#numbers .good")).to_have_text(
        "Wrong transitions0of 334,112 checked"
    )
    expect(page.locator("#numbers")).to_contain_text(
        "Faults injected424 transitions lost"
    )
    expect(page.locator("#numbers")).to_contain_text("Last recovery83 msKill it")
    expect(page.locator("#caption")).to_contain_text("A policy learns")
    expect(page.locator(".tile").first).to_contain_text(re.compile("Env 1.0return 0"))
    expect(page.locator(".tile").last).to_contain_text("Env 2.2")
    expect(page.locator(".server h2")).to_have_text(
        ["Server 1: sim1 is up", "Server 2: tcp://sim2:5555 is up"]
    )
    expect(page.locator("#servers")).to_contain_text("2 worker died, 1 timeout")
    expect(page.locator("#envs")).to_contain_text(EVIL)
    assert page.locator("#envs h2 img").count() == 0
    assert page.title() == "envserve"
    durations = page.evaluate("[0.0025, 0.0996, 0.9996].map(formatDuration)")
    assert durations == ["2.5 ms", "100 ms", "1000 ms"]
    width = page.viewport_size
    assert width is not None
    assert page.evaluate("document.documentElement.scrollWidth") <= width["width"]


def test_the_chart_of_returns_moves_while_the_last_returns_are_equal(
    page: Page,
) -> None:
    shown = page.evaluate(
        """() => {
          const shown = [...Array(300).keys()].map((index) => Math.min(index, 250));
          return [shown, [...shown.slice(1), 250]].map((returns) => {
            episodes = returns;
            drawCharts();
            return $("#episodes svg").innerHTML;
          });
        }"""
    )
    assert shown[0] != shown[1]


def test_an_env_that_does_not_render_is_shown_as_a_card(page: Page) -> None:
    card = page.locator(".tile").last
    card.scroll_into_view_if_needed()
    expect(card).to_contain_text("no image: render_mode is None")
    expect(card.locator("img")).to_be_hidden()


def test_the_page_can_be_used_with_the_keyboard_alone(page: Page) -> None:
    focus = page.locator(":focus")

    def expect_focus(label: str) -> None:
        pattern = re.compile(f"^{re.escape(label)}")
        expect(focus).to_have_attribute("aria-label", pattern)

    while not page.locator(".tile:focus").count():
        page.keyboard.press("Tab")
    page.keyboard.press("Home")
    expect_focus("Env 1.0 of CartPole-v1: return ")
    expect(focus).to_have_css("outline-style", "solid")
    page.keyboard.press("ArrowRight")
    expect_focus("Env 1.1 of CartPole-v1: ")
    page.keyboard.press("ArrowDown")
    expect(focus).not_to_have_attribute("aria-label", re.compile("^Env 1.1 "))
    page.keyboard.press("ArrowUp")
    expect_focus("Env 1.1 of CartPole-v1: ")
    page.keyboard.press("End")
    expect_focus(f"Env 2.2 of {EVIL}")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    large = page.locator("dialog")
    expect(large).to_be_visible()
    expect(large).to_contain_text("Env 1.0 of CartPole-v1")
    expect(large).to_contain_text(str(2**60))
    page.keyboard.press("ArrowRight")
    expect(large).to_contain_text("Env 1.1 of CartPole-v1")
    page.keyboard.press("Escape")
    expect(large).to_be_hidden()
    expect_focus("Env 1.1 of CartPole-v1: ")  # the focus has moved


def test_an_absent_env_is_grey_and_shows_how_long_it_was_absent(
    page: Page, servers: dict[str, FakeServerState]
) -> None:
    tile = page.locator(".tile").nth(4)
    expect(tile.locator("img")).to_be_visible()
    boxes = "[...document.querySelectorAll('.tile, .card')].map((each) => "
    boxes += "JSON.stringify(each.getBoundingClientRect()))"
    before = page.evaluate(boxes)
    server = servers["tcp://sim1:5555"]
    server.replace_lease(0, absent=(4, 5))
    expect(tile).to_have_class(ABSENT)
    expect(tile).to_contain_text(ABSENT)
    expect(page.locator(".tile").nth(3)).not_to_have_class(ABSENT)
    assert page.evaluate(boxes) == before
    back = ((1, 4, 83), (2, 5, 83))
    server.replace_lease(0, absent=(), recoveries=back, num_recoveries=2)
    expect(tile).to_contain_text("back in 83 ms")
    expect(tile).not_to_have_class(ABSENT)
    assert page.evaluate(boxes) == before


def test_the_envs_of_a_server_disappear_and_return_with_it(
    page: Page, servers: dict[str, FakeServerState]
) -> None:
    server = servers["tcp://sim1:5555"]
    server.error = ConnectError("no server replied within 2 s")
    expect(page.locator(".server").first).to_contain_text("sim1 is gone")
    expect(page.locator(".server").first).to_contain_text("no server replied")
    expect(page.locator(".tile").first).to_have_class(ABSENT)
    server.error = None
    expect(page.locator(".server").first).to_contain_text("sim1 is up")
    expect(page.locator(".tile").first).to_contain_text("back")


def test_a_lease_that_replaces_another_keeps_its_tiles(
    page: Page, servers: dict[str, FakeServerState]
) -> None:
    tile = page.locator(".tile").first
    server, count = servers["tcp://sim1:5555"], page.locator(".tile").count()
    server.replace_lease(0, number=9)
    server.ticks = 77  # only the new lease's frames show this tick
    expect(tile).to_contain_text("77")
    expect(page.locator(".head", has_text="CartPole")).not_to_contain_text("ended")
    assert page.locator(".tile").count() == count


def test_a_flight_record_is_downloaded(page: Page) -> None:
    page.locator(".tile").nth(2).click()
    with page.expect_download() as download:
        page.get_by_text("Download flight record").click()
    assert download.value.suggested_filename == "lease-1-env-2.repro"
    assert Path(download.value.path()).read_bytes() == b"record of 1 2"
    expect(page.locator("#hint")).to_contain_text("envserve replay lease-1-env-2")


def test_episodes_are_drawn_while_they_run(
    page: Page, servers: dict[str, FakeServerState]
) -> None:
    servers["tcp://sim1:5555"].end_episodes(0, *range(300, 330))
    expect(page.locator("#episodes")).to_contain_text("last 30")
    expect(page.locator("#numbers")).to_contain_text("314.5")


def test_the_axis_of_equal_returns_begins_at_zero(
    page: Page, servers: dict[str, FakeServerState]
) -> None:
    servers["tcp://sim1:5555"].end_episodes(0, *[500.0] * 30)
    expect(page.locator("#episodes")).to_contain_text("last 30")
    expect(page.locator("#episodes svg")).to_contain_text(re.compile("^0200400600"))


def test_a_button_reports_its_result(page: Page) -> None:
    page.get_by_role("button", name="Kill a worker").click()
    expect(page.locator("#toast")).to_have_text("Dead.")


@pytest.mark.parametrize("servers", [320], indirect=True)
def test_the_effect_of_a_button_is_scrolled_into_view(page: Page) -> None:
    affected = page.locator(".tile").last
    expect(affected).not_to_be_in_viewport()
    page.get_by_role("button", name="Kill a worker").click()
    expect(affected).to_be_in_viewport(ratio=1)
    expect(affected).to_have_class(ABSENT)


def test_a_tile_without_an_image_does_not_look_absent(
    page: Page, servers: dict[str, FakeServerState]
) -> None:
    server = servers["tcp://sim1:5555"]
    server.ticks = -1  # there are no frames yet
    server.replace_lease(0, num_envs=5, number=7, absent=(4,))
    shots = page.locator(".lease", has_text="5 envs").locator(".shot")
    for row, is_absent in ((3, False), (4, True)):
        expect(shots.nth(row)).to_have_text("no image yet")
        plain = expect(shots.nth(row), f"row {row}")
        check = plain.not_to_have_css if is_absent else plain.to_have_css
        check("background-color", "rgba(0, 0, 0, 0)")


def test_a_page_whose_servers_are_gone_is_not_live_and_keeps_their_counts(
    page: Page, servers: dict[str, FakeServerState]
) -> None:
    connection = page.locator("#connection")
    steps = page.locator(".number", has_text="Steps per second").locator("small")
    expect(steps).to_have_text("2.4M steps in total")
    for server in servers.values():
        server.error = ConnectError("no server replied within 2 s")
    expect(connection).to_have_text("no server replies")
    expect(connection).to_have_class(re.compile("gone"))
    expect(steps).to_have_text("2.4M steps in total")
    restarted = servers["tcp://sim1:5555"]
    restarted.replace(pid=4712, seconds=1.0, steps=500_000)
    restarted.error = None
    expect(connection).to_have_text("live")
    expect(steps).to_have_text("2.9M steps in total")


@pytest.mark.parametrize("servers", [320], indirect=True)
def test_frames_are_requested_only_while_their_tile_is_visible(
    page: Page, servers: dict[str, FakeServerState]
) -> None:
    server = servers["tcp://sim1:5555"]
    first, last = (page.locator(".tile").nth(place) for place in (1, 319))
    expect(first.locator("img")).to_be_visible()
    assert 319 not in {row for _, rows, _ in server.frame_requests for row in rows}
    last.scroll_into_view_if_needed()
    expect(last.locator("img")).to_be_visible()
    server.frame_requests.clear()
    server.ticks = 77
    expect(last).to_contain_text("77")
    assert 1 not in {row for _, rows, _ in server.frame_requests for row in rows}


def test_a_page_shows_that_nothing_has_begun_and_that_the_run_has_ended(
    chromium: Browser, servers: dict[str, FakeServerState], tmp_path: Path
) -> None:
    server = servers["tcp://sim1:5555"]
    server.replace(steps=0)
    server.replace_lease(0, episodes=())
    feed = DataFeed([""], tmp_path, cast(Any, lambda _: FakeObserver(server)))
    with (
        served(lambda token: build_app(feed, token=token)) as url,
        chromium.new_context() as context,
    ):
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#connection")).to_have_text("live")
        for chart in ("#curve", "#episodes"):
            text = "no env has been stepped"
            expect(page.locator(f"{chart} span")).to_have_text(text)
        feed.finish_run()
        expect(page.locator("#connection")).to_have_text("the run has ended")


def test_a_page_from_before_a_restart_says_so(
    chromium: Browser, servers: dict[str, FakeServerState]
) -> None:
    def build(token: str):  # type: ignore[no-untyped-def]
        address = "tcp://sim1:5555"
        server = FakeObserver(servers[address])
        feed = DataFeed([address], None, cast(Any, lambda _: server))
        return build_app(feed, token=token)

    with chromium.new_context() as context, socket.socket() as kept:
        # Reserve the port for this test, without listening on it.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        with served(build, port) as url:
            page.goto(url)
            expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("#connection")).to_contain_text(
            "disconnected; reconnecting"
        )
        with served(build, port) as again:
            assert again.partition("?")[0] == url.partition("?")[0]
            text = "open the URL that the command printed"
            expect(page.locator("#connection")).to_contain_text(text)


def test_a_server_that_reports_endless_envs_does_not_fill_the_browser(
    page: Page, servers: dict[str, FakeServerState]
) -> None:
    lying = next(iter(servers.values()))
    names = [str(number) for number in range(200)]
    lying.status = FakeServerState(*names, num_envs=10**15).status
    lying.replace_lease(0, number=2**60)
    expect(page.locator(".lease")).to_have_count(128)
    expect(page.locator(".tile")).to_have_count(2048)
