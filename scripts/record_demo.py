"""Create the images of docs/demo.md from the page of `envserve demo`.

demo.gif and demo.png show the agent while it learns, while a worker is killed, and
while the network is cut; demo-phone.png shows the cut network on a phone. Requires the
extras browser and demo, and Chromium (/usr/bin/chromium, or the path in CHROMIUM).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from envserve.python_process import main_command

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
DESK: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
GIF_SIZE = 800, 500
FRAME_MILLISECONDS = 200.0
NUM_COLORS = 128


@contextlib.contextmanager
def running_demo(*options: str) -> Iterator[str]:
    """Run a demo; yield the URL of its page."""
    command = main_command("envserve.__main__", "demo", "--no-open", "--port", "0")
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        try:
            yield re.findall(r"http://\S+", demo.stdout.readline())[0]
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(30)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium."""
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


class Recording:
    """Screenshots of a page, each with its duration in milliseconds."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[bytes] = []
        self.durations: list[int] = []

    def record(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (begin := time.monotonic()) < end:
            self.frames.append(self.page.screenshot())
            elapsed = 1000 * (time.monotonic() - begin)
            self.page.wait_for_timeout(max(1.0, FRAME_MILLISECONDS - elapsed))
            self.durations.append(round(1000 * (time.monotonic() - begin)))

    def save(self, path: Path) -> None:
        images = [Image.open(io.BytesIO(data)).convert("RGB") for data in self.frames]
        frames = [image.resize(GIF_SIZE) for image in images]
        # The default method of `quantize` would omit the colours of thin lines.
        palette = frames[-1].quantize(NUM_COLORS, Image.Quantize.MAXCOVERAGE)
        first, *others = (
            frame.quantize(palette=palette, dither=Image.Dither.NONE)
            for frame in frames
        )
        first.save(
            path, save_all=True, append_images=others, duration=self.durations, loop=0
        )


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).click(no_wait_after=True)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with chromium() as browser, running_demo() as url:
        page = browser.new_page(viewport=DESK)
        page.goto(url)
        page.locator(".tile img:not([hidden])").first.wait_for()
        recording = Recording(page)
        recording.record(5.0)
        press(page, "Kill a worker")
        recording.record(3.0)
        press(page, "Cut the network")
        recording.record(5.0)
        recording.save(FOLDER / "demo.gif")
        phone = browser.new_page(viewport=PHONE)
        phone.goto(url)
        for view, name in ((page, "demo.png"), (phone, "demo-phone.png")):
            view.locator(".tile img:not([hidden])").first.wait_for()
            press(view, "Cut the network")
            view.locator(".lease", has_text="server gone").wait_for()
            view.screenshot(path=FOLDER / name)
            view.locator(".badge", has_text="back").first.wait_for()
    for path in FOLDER.glob("demo*.png"):
        with Image.open(path) as image:
            image.convert("RGB").quantize(256).save(path, optimize=True)
    for path in FOLDER.glob("demo*"):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
